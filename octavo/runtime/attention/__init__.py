"""Attention back ends over the paged cache; one is chosen at construction."""
