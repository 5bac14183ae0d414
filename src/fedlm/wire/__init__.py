"""Codecs of updates: decoded bytes equal the simulated update, and reported sizes are real."""
