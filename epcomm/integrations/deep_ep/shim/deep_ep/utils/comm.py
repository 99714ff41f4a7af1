"""Refuse the import of deep_ep.utils.comm: NCCL communicators of DeepEP."""

raise ImportError(f"{__name__} is absent in epcomm; epcomm needs none")
