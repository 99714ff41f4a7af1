"""Say what the kernels of both modes share, and what a plan is made of."""
