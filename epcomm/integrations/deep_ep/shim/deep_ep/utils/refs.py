"""Refuse the names of deep_ep.utils.refs: references that DeepEP's tests compare with."""

from epcomm.integrations.deep_ep.missing import absent_names

__getattr__ = absent_names(__name__, "copy this module from DeepEP's sources")
