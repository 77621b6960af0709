"""The C kernels and their bindings."""
