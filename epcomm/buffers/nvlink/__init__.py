"""Buffers of GPUs that write one another's memory over NVLink."""
