"""The layer graph: axis expressions, spaces, operations; where they come from. No numbers."""
