"""How the front reaches an engine core: in its own process, or in another one behind two pipes."""
