"""Absent: NCCL communicators of DeepEP."""

_ABSENT = f"{__name__} is absent in epcomm; epcomm needs none"
raise ModuleNotFoundError(_ABSENT, name=__name__)
