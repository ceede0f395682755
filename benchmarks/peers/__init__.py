"""Beside the peers: other tools compress the same weights with the same images, and one judge measures all of them.

    PYTHONPATH=benchmarks python -m peers --help

Each tool runs in an environment of its own (``environments.py``), in a process that reads a job file and leaves a
compressed model behind (``job.py``, ``worker.py``, one file per tool in ``tools/``). The judge (``judge.py``) knows
nothing of the tools: it reads files. ``page.py`` makes docs/peers.md of results/benchmark_peers.json.
"""
