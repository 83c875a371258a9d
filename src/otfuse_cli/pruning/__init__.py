"""Structured pruning: which units go, how, and what a pruned network has kept."""
