"""The door for people: a command does what the library call does."""
