"""Local operations on rows and slots, in plain torch."""
