"""Preparation of client stores: the same text gives the same store, byte for byte."""
