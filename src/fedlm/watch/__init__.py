"""The live page over all runs of a folder, and the keyboard."""
