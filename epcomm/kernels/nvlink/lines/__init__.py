"""Kernels of low latency over NVLink for few tokens, sent in lines; see common/lines.py."""
