"""One verb per file: request in, report out. The commands and the library are these."""
