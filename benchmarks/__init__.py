"""Speed, measured side by side in one run: ratios and medians, never single times."""
