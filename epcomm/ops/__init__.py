"""Local operations on rows and slots: in plain torch, and by kernels on GPUs."""
