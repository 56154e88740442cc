"""Beam search: its parameters and its rules."""
