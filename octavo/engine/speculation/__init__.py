"""Guessing the next tokens of requests, so that one step computes several: speculative decoding.

A guess cannot change a text. The noise of a draw depends on seed and position alone, and a guessed token is
kept exactly when it is the token that is drawn there.
"""
