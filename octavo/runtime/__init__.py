"""The runtime, all that needs torch: models, layers, kernels, sampling, and the workers that run them."""
