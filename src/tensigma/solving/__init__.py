"""A layer's problem (method, norm, statistics) to its solution, kept in memory and on disk, over threads and processes."""
