"""The module deep_ep.buffers."""
