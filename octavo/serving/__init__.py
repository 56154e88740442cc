"""The HTTP server: OpenAI's protocol and octavo's own routes over one asynchronous engine."""
