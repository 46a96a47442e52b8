"""Pages of the key/value cache."""
