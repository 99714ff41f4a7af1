"""How benchmarks measure and check, and what they say of the machine."""
