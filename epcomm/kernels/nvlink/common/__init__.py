"""Say what the kernels share: signals, barrier, epochs and status of both modes, parts of plans."""
