"""What is computed: `spec.py` reads a config, `hub.py` finds and loads a checkpoint, `decoder.py` runs it."""
