"""What a server keeps beyond an answer: files, batches and responses, as documents in one SQLite file."""
