"""Ways to compute a cohort's sum: every engine returns what the loop engine returns."""
