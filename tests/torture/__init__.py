"""Tensigma broken on purpose: damaged files, kills, odd networks, full disks, tight memory.

``python -m torture`` (``make torture``) runs thousands of cases and writes their counts; the test suite runs a sample.
"""
