"""Fuse trained neural-network checkpoints into one, by optimal transport."""

__version__ = "0.1.0"
