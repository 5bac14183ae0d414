"""Shared types, keys, trees, errors and durable files: no policy."""
