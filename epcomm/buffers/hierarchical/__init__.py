"""Buffers made of two: one between hosts, and one inside each host."""
