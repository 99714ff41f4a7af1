"""Client programs of deep_ep, from their own packages, run on the drop-in."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from epcomm.integrations.deep_ep import install
from epcomm.integrations.deep_ep.installing import SHIM


@pytest.fixture(scope="session")
def drop_in_modules() -> dict[str, ModuleType]:
    """Keep the modules of the drop-in between tests, because clients bind them at their import."""
    return {}


@pytest.fixture(autouse=True)
def drop_in(drop_in_modules: dict[str, ModuleType]) -> Iterator[None]:
    """Install the drop-in as deep_ep for one test; other tests install another package."""
    sys.modules.update(drop_in_modules)
    install()
    # Parts of Megatron are compiled at their first call, which needs a compiler and takes minutes.
    with torch.compiler.set_stance("force_eager"):
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
        drop_in_modules[name] = sys.modules.pop(name)
    if str(SHIM) in sys.path:
        sys.path.remove(str(SHIM))
