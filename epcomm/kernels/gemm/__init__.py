"""Multiply quantised rows by the matrices of their experts, in grouped products."""
