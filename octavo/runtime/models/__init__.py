"""Each family of architectures has one file, which says what is special about it."""
