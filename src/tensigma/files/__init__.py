"""Files and folders that are complete or absent, claimed by one writer at a time, and checked when they are read."""

from tensigma.files.claims import claimed
from tensigma.files.partials import recover, sweep
from tensigma.files.whole import whole_file, whole_folder

__all__ = ["claimed", "recover", "sweep", "whole_file", "whole_folder"]
