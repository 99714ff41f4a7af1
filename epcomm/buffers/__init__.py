"""Mechanisms that move rows between ranks: a folder for each backend, and shared modules."""
