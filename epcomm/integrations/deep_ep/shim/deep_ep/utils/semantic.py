"""Refuse the import of deep_ep.utils.semantic: internal helpers of DeepEP."""

raise ImportError(f"{__name__} is absent in epcomm; copy the module from DeepEP's sources")
