"""Measure epcomm against torch alone; each program checks results before it measures."""
