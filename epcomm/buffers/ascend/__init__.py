"""Buffers over the packages for Ascend NPUs."""
