"""Drafters with weights, a file per kind: they guess tokens behind each step, for the engine to verify."""
