"""Say what the kernels of both modes share: signals, barrier, epochs, status."""
