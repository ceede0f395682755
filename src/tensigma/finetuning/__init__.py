"""Training a compressed model, with labels or by the original's answers."""
