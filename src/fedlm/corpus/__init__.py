"""Text to client store: the same text gives the same store, byte for byte."""
