from importlib.metadata import PackageNotFoundError, version

import pytest


def needs(distribution: str) -> pytest.MarkDecorator:
    try:
        version(distribution)
    except PackageNotFoundError:
        is_missing = True
    else:
        is_missing = False
    reason = f"{distribution} is not installed; pip install --no-deps -r tests/clients.txt"
    return pytest.mark.skipif(is_missing, reason=reason)
