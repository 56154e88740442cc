"""Who computes what in the next step, and what the last one brought."""
