"""Front: requests to tokens and tokens to outputs, and the client ends of the engine's door. No torch."""
