"""Benchmarks: load on a server, offline runs, reports, the tuner.

The command line calls these modules (`octavo.cli.bench`). They ask any OpenAI-compatible server over HTTP,
or an engine through `octavo.LLM`; nothing here reaches into the engine.
"""
