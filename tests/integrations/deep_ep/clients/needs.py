from importlib.metadata import distributions

import pytest


def needs(distribution: str) -> pytest.MarkDecorator:
    is_missing = not any(distributions(name=distribution))
    reason = f"{distribution} is not installed; pip install --no-deps -r tests/clients.txt"
    return pytest.mark.skipif(is_missing, reason=reason)
