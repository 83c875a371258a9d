"""Searches for the maps of one source: one module each."""
