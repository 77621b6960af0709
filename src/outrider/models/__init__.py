"""Models: the lean decoder, the fallback to transformers' modelling code, and their interface."""
