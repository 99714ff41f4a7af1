"""Route tokens by one kernel: scores, groups, top-k, weights, load and replicas."""
