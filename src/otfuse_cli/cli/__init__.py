"""The command line: the only Typer, the only printing."""
