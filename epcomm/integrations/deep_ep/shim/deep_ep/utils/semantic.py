"""Refuse the names of deep_ep.utils.semantic: internal helpers of DeepEP."""

from epcomm.integrations.deep_ep.missing import absent_names

__getattr__ = absent_names(__name__, "copy this module from DeepEP's sources")
