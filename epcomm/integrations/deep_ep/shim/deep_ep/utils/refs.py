"""Refuse the import of deep_ep.utils.refs: references that DeepEP's tests compare with."""

_NAME = "deep_ep.utils.refs"
raise ModuleNotFoundError(
    f"{_NAME} is absent in epcomm; copy the module from DeepEP's sources", name=_NAME
)
