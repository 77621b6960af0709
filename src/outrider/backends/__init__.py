"""How it is computed: the interface in `base.py`, and one folder a backend."""
