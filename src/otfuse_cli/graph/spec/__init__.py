"""Layer graphs from names and shapes: specs, and the families that they describe."""
