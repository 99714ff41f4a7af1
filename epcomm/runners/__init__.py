"""Grouped expert computation over dispatched rows; one file a runner."""
