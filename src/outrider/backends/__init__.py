"""Backends: the interface in `base.py`, and one folder per backend."""
