"""The command `epcomm bench`: check and time the backends that serve here, and plain torch."""
