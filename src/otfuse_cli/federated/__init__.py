"""Clients that train apart, and a server that fuses what they send: rounds, plans, updates.

Knows nothing of Flower, or of any other server.
"""
