"""Weights on their way from a trainer to the ranks of a running engine: wire, sender and receiver."""
