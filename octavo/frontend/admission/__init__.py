"""Which requests may enter, and the threads that prepare them."""
