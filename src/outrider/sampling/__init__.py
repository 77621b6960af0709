"""Sampling: logits processors, random streams, and the sampler that applies them."""
