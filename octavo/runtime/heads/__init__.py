"""A head makes of a step's hidden states what the step brings: tokens, or vectors and scores."""
