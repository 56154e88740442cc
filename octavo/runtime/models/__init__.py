"""One file per family of architectures: what is special about it, and its weight map as data."""
