"""Sampling and packing of cohorts: the same key gives the same cohort, by the declared law."""
