"""From aligned models to one model."""
