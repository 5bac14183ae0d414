"""One member's update: equal to a plain training loop on that client's data."""
