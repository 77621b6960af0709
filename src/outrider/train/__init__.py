"""Training of draft heads and draft models for a target."""
