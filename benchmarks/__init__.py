"""Programs that measure epcomm against what torch alone offers; each checks before it measures."""
