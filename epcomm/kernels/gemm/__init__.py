"""Grouped products of experts, quantised."""
