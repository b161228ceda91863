"""The same core, offline: traces in, what would have happened out."""
