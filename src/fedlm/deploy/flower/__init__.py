"""Flower: every import of flwr, behind the remote engine's `Transport`."""
