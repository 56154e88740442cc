"""Ollama's HTTP API, for programs that know no other: /api/chat, generate, embed, tags, ps, show, version."""
