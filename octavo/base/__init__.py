"""Ground floor: errors, registries, log, environment, transport, model files. Imports nothing of octavo."""
