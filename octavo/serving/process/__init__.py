"""The processes that speak HTTP, from their sockets to their end: `octavo serve` is the first of them."""
