"""What others get of a finished run: pages, a statement to sign, a model in their format."""
