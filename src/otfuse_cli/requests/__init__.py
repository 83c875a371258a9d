"""What a command is asked to do, from the command line or from Python. Imports no torch."""
