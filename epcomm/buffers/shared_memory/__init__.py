"""The backend shared_memory: moves tokens between CPU ranks of one host."""
