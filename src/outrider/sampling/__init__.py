"""Which token follows: parameters, path-aware processors, counter-based noise, and the sampler that applies them."""
