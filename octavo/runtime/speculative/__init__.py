"""Drafters with weights: they guess the next tokens of requests behind each step, for the engine to verify.

One file per kind. What they guess cannot change a token: see octavo.engine.speculation.
"""
