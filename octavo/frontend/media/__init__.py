"""Images in prompts: where they come from, how they are read, what stands for them."""
