"""Which experts a rank holds, and parameters that say so."""
