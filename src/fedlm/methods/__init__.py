"""Federated methods: one file per method, its client half and its server half together."""
