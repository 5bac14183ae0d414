"""Shared types, keys, trees and errors: values only, no I/O and no policy."""
