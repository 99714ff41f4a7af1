"""Absent: paths of libraries that DeepEP is built with."""

_ABSENT = f"{__name__} is absent in epcomm; epcomm is not built with them"
raise ModuleNotFoundError(_ABSENT, name=__name__)
