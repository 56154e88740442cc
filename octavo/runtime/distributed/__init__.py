"""Ranks that share a model, and what they say to each other."""
