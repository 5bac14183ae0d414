"""Settings to objects: every setting is known, typed and used once."""
