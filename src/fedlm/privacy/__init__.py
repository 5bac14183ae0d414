"""What is added to a sum, and what it costs: noise of the stated law, and its epsilon."""
