"""Ways to move tokens to their experts and results back: backends of epcomm, and torch alone."""
