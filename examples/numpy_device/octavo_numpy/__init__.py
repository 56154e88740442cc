"""A platform for octavo that computes with numpy."""
