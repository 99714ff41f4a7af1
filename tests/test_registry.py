import pytest

from epcomm import ConfigError
from epcomm.buffers.base import Buffer
from epcomm.config import Mode
from epcomm.registry import BUFFERS, RUNNERS, backend_names, buffer_class, class_names, runner_class
from epcomm.runners.base import ExpertRunner


@pytest.mark.parametrize("name", BUFFERS)
def test_classes_of_a_backend_import_anywhere_and_have_its_name(name: str) -> None:
    for class_name in class_names(name):
        buffer = buffer_class(class_name)
        assert issubclass(buffer, Buffer)
        assert (buffer.__name__, buffer.name) == (class_name, name)
        for mode in buffer.modes:
            assert buffer.caps(mode).wire_dtypes


# Between hosts, low latency uses the flat exchange; exact sizes serve decode on CPU ranks.
@pytest.mark.parametrize("name", sorted(set(BUFFERS) - {"hierarchical"}))
def test_a_backend_serves_prefill_and_decode(name: str) -> None:
    served = {mode for each in class_names(name) for mode in buffer_class(each).modes}
    assert served >= {Mode.NORMAL, Mode.LOW_LATENCY}


@pytest.mark.parametrize("name", RUNNERS)
def test_registered_runner_imports_anywhere_under_its_name(name: str) -> None:
    runner = runner_class(name)
    assert issubclass(runner, ExpertRunner)
    assert runner.name == name
    assert runner.layouts


def test_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        runner_class("carrier_pigeon")
    message = f"runner is 'carrier_pigeon', expected auto or one of {sorted(RUNNERS)}"
    assert message in str(caught.value)


def test_deep_ep_is_whichever_is_installed() -> None:
    assert backend_names("deep_ep", Mode.AUTO) == ("deep_ep_v2", "deep_ep_v1")
    assert backend_names("nvlink", Mode.AUTO) == ("nvlink",)
    with pytest.raises(ConfigError, match="backend is 'deepep', expected auto or one of"):
        backend_names("deepep", Mode.AUTO)
