"""Be deep_ep.buffers."""
