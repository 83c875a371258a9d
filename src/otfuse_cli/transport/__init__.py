"""Discrete optimal transport: cost, mass, plan, maps. No names, no files."""
