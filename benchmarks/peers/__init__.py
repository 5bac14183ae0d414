"""fedlm's round beside that of other frameworks: `make bench-peers`. Start with README.md."""
