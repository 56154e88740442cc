"""Bookkeeping of the paged KV cache: ids, counts and digests; the bytes live in the workers."""
