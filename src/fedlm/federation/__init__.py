"""Rounds of a flat federation and of a tree, put together from the other packages."""
