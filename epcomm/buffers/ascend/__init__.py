"""Buffers over the vendor packages for Ascend NPUs."""
