"""One file per tool; each is run by the Python of its own environment."""
