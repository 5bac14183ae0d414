"""Secure sums: the server learns the sum of the nodes' vectors, and no vector."""
