"""Move tokens between ranks that share the memory of a host."""
