"""Layer graphs from a module: export it, label every axis, name what was found."""
