"""`RequestOutput` and what it is made of."""
