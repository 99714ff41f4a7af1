"""Measure epcomm against plain torch; each program checks results before it measures."""
