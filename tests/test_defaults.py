"""The library does not depend on the default device or dtype of torch.

`make test-defaults` runs the quick tests under other ones, see tests/defaults.py.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import epcomm
from epcomm import EPConfig, EPGroup, Mode
from epcomm.testing import layer_suite
from tests.defaults import default_dtype

if TYPE_CHECKING:
    from mpi4py import MPI

PACKAGE = Path(epcomm.__file__).parent
# Functions whose result has the default dtype for any arguments.
FLOATS = frozenset(
    ["empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"]
)
# Other functions whose result is on the default device.
OTHERS = [
    *("arange", "as_tensor", "asarray", "full", "randint"),
    *("randperm", "scalar_tensor", "tensor", "tril_indices"),
]
# Modules that compute under on_cpu(), which sets the default device.
ON_CPU = {"probing.py", "random_copy.py"}


def unnamed(path: Path) -> Iterator[str]:
    """Yield the calls of a module that make a tensor without a device or dtype argument."""
    on_default_device = FLOATS.union(OTHERS) if path.name not in ON_CPU else frozenset()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                names = {each.arg for each in node.keywords}
                lacks_device = name in on_default_device and "device" not in names
                lacks_dtype = name in FLOATS and "dtype" not in names
                if lacks_device or lacks_dtype:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_tensors_name_their_device_and_dtype() -> None:
    found = [call for path in sorted(PACKAGE.rglob("*.py")) for call in unnamed(path)]
    assert not found, "\n".join(found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.LOW_LATENCY])
def test_layers_run_under_other_defaults(mode: Mode, ep_ranks: "MPI.Comm | None") -> None:
    with torch.device("meta"), default_dtype(torch.bfloat16), EPGroup(ep_ranks) as group:
        layer_suite.run_scenario("holes", layer_suite.pipeline_env(group, EPConfig(mode=mode)))
