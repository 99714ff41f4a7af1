"""Imitate vendor packages on a CPU, for tests; no part of the wheel."""
