"""Dispatch of normal mode over NVLink in CUDA C++: rows by the copy engine, an index meanwhile."""
