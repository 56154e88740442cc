"""From files to parameters: one module per format."""
