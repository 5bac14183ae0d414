"""The mean is the mean; one SGD step of size 1 is FedAvg."""
