"""The backend hierarchical: one buffer between hosts and one inside each host."""
