"""The properties of this machine: hosts, GPUs, NPUs and the packages of their vendors."""
