"""Commands of `octavo bench`: one module each, with the flags; what they do is in `octavo.bench`."""
