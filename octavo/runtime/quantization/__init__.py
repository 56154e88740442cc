"""A scheme says how weights are stored and multiplied: one file each."""
