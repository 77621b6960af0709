"""Learning from traffic: a trained head goes on training on the target's own outputs, between steps."""
