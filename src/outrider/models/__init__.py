"""What is computed: `spec.py` reads a config, `hub.py` finds and loads a checkpoint, `model.py` chooses who runs it."""
