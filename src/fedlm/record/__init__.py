"""The record of a run: a crash loses nothing, and reports are functions of the journal."""
