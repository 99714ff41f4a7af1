"""The registries: every name imports, an unknown one lists those that exist."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epcomm import ConfigError
from epcomm.buffers.base import Buffer
from epcomm.registry import BUFFERS, RUNNERS, buffer_class, buffer_family, runner_class
from epcomm.runners.base import ExpertRunner


@pytest.mark.parametrize("name", BUFFERS)
def test_registered_buffer_imports_anywhere_under_its_name(name: str) -> None:
    buffer = buffer_class(name)
    assert issubclass(buffer, Buffer)
    assert buffer.name == name
    for mode in buffer.modes:
        assert buffer.caps(mode).wire_dtypes


@pytest.mark.parametrize("name", RUNNERS)
def test_registered_runner_imports_anywhere_under_its_name(name: str) -> None:
    runner = runner_class(name)
    assert issubclass(runner, ExpertRunner)
    assert runner.name == name
    assert runner.layouts


@pytest.mark.parametrize(
    ("look_up", "kind", "names"),
    [(buffer_class, "backend", BUFFERS), (runner_class, "runner", RUNNERS)],
    ids=["backend", "runner"],
)
def test_unknown_name_lists_those_that_exist(
    look_up: Callable[[str], type], kind: str, names: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        look_up("carrier_pigeon")
    message = f"{kind} is 'carrier_pigeon', expected auto or one of {sorted(names)}"
    assert message in str(caught.value)


def test_a_family_is_all_whose_names_begin_so() -> None:
    assert buffer_family("collective") == ("collective",), "a name of its own is no family"
    family = buffer_family("deep_ep")
    assert set(family) == {name for name in BUFFERS if name.startswith("deep_ep_")}
    with pytest.raises(ConfigError, match="backend is 'deepep', expected auto or one of"):
        buffer_family("deepep")
