"""Refuse the names of deep_ep.utils.find_pkgs: paths of libraries that DeepEP is built with."""

from epcomm.integrations.deep_ep.missing import absent_names

__getattr__ = absent_names(__name__, "epcomm is not built with them")
