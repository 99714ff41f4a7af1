"""Support training loops: gradients of experts, steps without data, and checkpoints."""
