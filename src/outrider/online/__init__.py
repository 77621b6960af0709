"""Learning from traffic: a head or draft model is trained further on the target's outputs, between steps."""
