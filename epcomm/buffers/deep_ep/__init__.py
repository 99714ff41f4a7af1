"""Buffers over the deep_ep package, its versions 1 and 2."""
