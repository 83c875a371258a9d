"""What is read off a layer graph: streams, heads, targets of fits, differences."""
