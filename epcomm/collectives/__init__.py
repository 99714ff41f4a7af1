"""The collective operations that every transport implements, and the transports."""
