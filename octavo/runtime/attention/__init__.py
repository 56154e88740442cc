"""An attention back end works over the paged cache; one is chosen at construction."""
