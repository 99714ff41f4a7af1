"""Buffer and Config of DeepEP V1, over epcomm's buffers."""
