"""Loaders bring weights from files to parameters: one module per format."""
