"""Refuse the import of deep_ep.utils.find_pkgs: paths of libraries that DeepEP is built with."""

raise ImportError(f"{__name__} is absent in epcomm; epcomm is not built with them")
