"""Checkpoint files: lazy safe reading, atomic writing, names. No networks."""
