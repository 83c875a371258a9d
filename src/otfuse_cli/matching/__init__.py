"""From a pair of graphs to maps to aligned tensors."""
