"""The Triton and CUDA kernels, one operation a file; `import epcomm` imports none of them."""
