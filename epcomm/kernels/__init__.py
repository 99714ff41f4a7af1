"""Triton kernels, one operation a file; nothing here is imported by `import epcomm`."""
