"""Compressed models outside this process: archives, exported files, fewer bits, other runtimes."""
