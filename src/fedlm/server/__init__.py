"""Aggregation of updates: their exact mean; one SGD step of size 1 on it is FedAvg."""
