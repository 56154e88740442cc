"""How weights are stored and multiplied: one file per scheme."""
