"""Refuse the import of deep_ep.utils.comm: NCCL communicators of DeepEP."""

_NAME = "deep_ep.utils.comm"
raise ModuleNotFoundError(f"{_NAME} is absent in epcomm; epcomm needs none", name=_NAME)
