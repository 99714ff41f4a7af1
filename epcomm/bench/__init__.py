"""The command `epcomm bench`: check and time what serves a layer here, beside torch alone."""
