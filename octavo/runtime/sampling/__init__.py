"""Sampling: logits in, tokens out."""
