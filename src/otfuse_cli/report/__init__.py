"""The report of a command: its records, and the files that hold them."""
