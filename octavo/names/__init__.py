"""Import paths under which programs look for octavo's names: a table, and what vLLM's programs need."""
