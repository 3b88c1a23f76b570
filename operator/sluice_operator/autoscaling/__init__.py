"""How many engines a cluster has: the pure decision, and what it goes by."""
