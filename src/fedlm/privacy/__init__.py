"""Noise for sums of client updates, and the epsilon that this noise gives."""
