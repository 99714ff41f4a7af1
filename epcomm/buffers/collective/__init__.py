"""Buffers over the collective operations of any transport."""
