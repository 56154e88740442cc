"""OpenAI's responses: their requests become chat requests, and what the model says a list of items."""
