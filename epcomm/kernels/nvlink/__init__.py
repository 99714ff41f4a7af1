"""NVLink kernels, named by mode (ll: low latency), phase and side."""
