"""Metrics, health, spans, log lines and progress bars."""
