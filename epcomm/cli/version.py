"""The version of epcomm, as it was installed."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Return the version of the distribution; unknown where its sources run uninstalled."""
    try:
        return metadata.version("epcomm")
    except metadata.PackageNotFoundError:
        return "unknown"
