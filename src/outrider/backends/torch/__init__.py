"""The torch kernels: any device, and the reference of the others."""
