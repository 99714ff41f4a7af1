"""The weights of experts, as checkpoints hold them and as one rank computes with them."""
