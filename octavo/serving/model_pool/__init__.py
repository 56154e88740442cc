"""Several models in one server: what is loaded, what waits, what gives way. Used by `engines`."""
