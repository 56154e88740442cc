"""Ranks share a model; what they say to each other is here."""
