"""Formats of checkpoint files, each read without running anything that is in it."""
