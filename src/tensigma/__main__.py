"""``python -m tensigma``: the command line, also for ``torchrun --nproc_per_node=2 -m tensigma …``."""

from tensigma.cli import main

if __name__ == "__main__":
    main()
