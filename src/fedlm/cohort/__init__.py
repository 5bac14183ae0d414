"""Who joins a round, and in which shape: same key, same cohort, by the declared law."""
