"""Learning from traffic: a head or draft model goes on training on the target's outputs, between steps."""
