"""A process runs only a recipe that it has checked, and does what the recipe says."""
