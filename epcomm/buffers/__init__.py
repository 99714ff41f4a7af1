"""Mechanisms that move rows between ranks; one file a backend."""
