"""Code that the kernels share: signals, barrier, epochs, status, and parts of plans."""
