"""Kernels that quantise rows."""
