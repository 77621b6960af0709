"""The operations of a backend as Triton kernels."""
