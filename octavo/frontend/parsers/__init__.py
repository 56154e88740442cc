"""Model output as events (text, reasoning, tool calls), fed piece by piece; equal at every split."""
