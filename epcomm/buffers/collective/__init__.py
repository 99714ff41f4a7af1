"""Move tokens by the collective operations of any transport."""
