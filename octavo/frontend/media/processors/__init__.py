"""What each family makes of an image: the same numbers as transformers' processors on Pillow."""
