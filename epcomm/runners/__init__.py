"""Compute the experts of a rank over dispatched rows; one file holds one runner."""
