"""Text and tokens: vocabulary, chat template, incremental decoding, stop strings."""
