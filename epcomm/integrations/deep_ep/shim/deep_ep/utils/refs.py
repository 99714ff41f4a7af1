"""Refuse the import of deep_ep.utils.refs: references that DeepEP's tests compare with."""

raise ImportError(f"{__name__} is absent in epcomm; copy the module from DeepEP's sources")
