"""Carrying out a plan: layers fitted independently or in sequence, then refined."""
