"""Benchmarks of routing: no rank waits for another."""
