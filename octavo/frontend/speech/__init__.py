"""Transcripts of speech: prompts, windows of long audio, segments, words and subtitles."""
