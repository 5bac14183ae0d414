"""Decoded bytes equal what simulation assumed; the reported size is the real size."""
