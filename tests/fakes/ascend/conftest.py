from collections.abc import Iterator

import pytest

from fakes.ascend import limits, registry


@pytest.fixture(autouse=True)
def machine() -> Iterator[limits.Machine]:
    registry.register()
    with limits.soc("A3", size_limits=False) as chosen:
        yield chosen
