"""Import paths under which vLLM's users know what octavo has at the top."""
