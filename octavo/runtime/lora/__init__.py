"""Adapters: what they change of which products, read from folders of PEFT, and the methods that apply it."""
