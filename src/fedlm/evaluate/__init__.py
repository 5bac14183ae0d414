"""Evaluation figures that agree with their definition on cases computed by hand."""
