"""What a training loop adds to the layers: gradients of experts."""
