"""The command `epcomm bench`: check and time what serves a layer here, and torch alone."""
