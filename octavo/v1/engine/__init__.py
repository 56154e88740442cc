"""See octavo.v1."""
