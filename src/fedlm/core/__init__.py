"""The shared words: types, keys, trees and errors. Values only; no I/O, no policy."""
