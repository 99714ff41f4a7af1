"""Refuse the import of deep_ep.utils.semantic: internal helpers of DeepEP."""

_NAME = "deep_ep.utils.semantic"
raise ModuleNotFoundError(
    f"{_NAME} is absent in epcomm; copy the module from DeepEP's sources", name=_NAME
)
