"""Say what this machine has: hosts, GPUs, NPUs and the packages of their vendors."""
