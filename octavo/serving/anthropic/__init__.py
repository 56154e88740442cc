"""Anthropic's protocol: its requests become chat requests, and what the model says its messages."""
