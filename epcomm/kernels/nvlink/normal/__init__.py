"""Normal mode over NVLink in CUDA C++: the copy engine moves rows while the index is written."""
