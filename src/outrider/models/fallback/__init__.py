"""Any causal model of transformers, on our cache and attention."""
