"""Refuse the import of deep_ep.utils.find_pkgs: paths of libraries that DeepEP is built with."""

_NAME = "deep_ep.utils.find_pkgs"
raise ModuleNotFoundError(f"{_NAME} is absent in epcomm; epcomm is not built with them", name=_NAME)
