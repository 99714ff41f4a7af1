"""Measure, check and describe the machine, for the benchmarks."""
