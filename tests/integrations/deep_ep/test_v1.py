import inspect
import json
import sys
from importlib import import_module

import pytest

from epcomm import ConfigError
from epcomm.integrations import deep_ep as drop_in
from epcomm.integrations.deep_ep import Buffer, Config
from epcomm.platforms.deep_ep import DeepEPKind, find_deep_ep
from fakes.deep_ep import install
from fakes.deep_ep.limits import limits_off
from fakes.deep_ep.strict_v1 import Buffer as StrictBuffer
from fakes.deep_ep.strict_v2 import ElasticBuffer
from tests.integrations.deep_ep.v1_ranks import CASES, CONTRACTS, LL_H, E, H, M

SIGNATURES = json.loads((CONTRACTS / "deep_ep_v1_signatures.json").read_text("utf-8"))
STRICT = (StrictBuffer, ElasticBuffer)
# These methods refuse any arguments.
ABSENT = {"internode_dispatch", "internode_combine"}


@pytest.mark.parametrize("kind", [Buffer, StrictBuffer], ids=["drop_in", "strict"])
@pytest.mark.parametrize("name", sorted(SIGNATURES["methods"].keys() - ABSENT))
def test_signatures_equal_the_real_ones(name: str, kind: type[Buffer]) -> None:
    expected = SIGNATURES["methods"][name]
    found = [
        (parameter.name, None if parameter.default is parameter.empty else str(parameter.default))
        for parameter in inspect.signature(getattr(kind, name)).parameters.values()
        # Keyword-only arguments, which are of branches of DeepEP, are not in the contract.
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert found == [(entry["name"], entry.get("default")) for entry in expected["parameters"]]
    assert isinstance(inspect.getattr_static(kind, name), staticmethod) is expected["static"]


def test_exports_equal_the_real_ones() -> None:
    expected = SIGNATURES["module"]
    with install("v1") as module:
        assert set(expected["exports"]) == set(module.__all__) - {"CPU_RANKS"}
        assert str(module.topk_idx_t) == expected["topk_idx_t"]
        assert module.CPU_RANKS is True
    assert set(expected["exports"]) <= set(drop_in.__all__)
    assert drop_in.topk_idx_t is module.topk_idx_t
    parameters = inspect.signature(Config).parameters.values()
    text = ", ".join(f"{parameter.name}={parameter.default}" for parameter in parameters)
    assert f"Config({text})" == expected["Config"]["init"]


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_installed_as_deep_ep_and_removed(kind: str) -> None:
    assert "deep_ep" not in sys.modules
    with install(kind) as outer:
        assert import_module("deep_ep") is outer
        assert (outer.Buffer if kind == "v1" else outer.ElasticBuffer) in STRICT
        assert outer.CPU_RANKS is True
        installed = find_deep_ep()
        assert installed.kind is DeepEPKind[kind.upper()]
        with install("v1") as inner:
            assert sys.modules["deep_ep"] is inner
        assert sys.modules["deep_ep"] is outer
    assert "deep_ep" not in sys.modules
    with pytest.raises(ValueError, match=r"'v3', expected one of v1, v2, ascend"), install("v3"):
        pass


@pytest.mark.parametrize("case", ["low_latency_uneven", "low_latency_empty_rank"])
def test_size_hint_equals_the_recording(case: str) -> None:
    hint = Buffer.get_low_latency_rdma_size_hint(M, LL_H, 4, E)
    assert {recorded["size_hint_bytes"] for recorded in CASES[case]} == {hint}


def test_configs_refuse_what_the_real_ones_refuse() -> None:
    with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 3"):
        StrictBuffer.get_dispatch_config(3)
    with pytest.raises(AssertionError, match="must be even"):
        Buffer.set_num_sms(3)
    with pytest.raises(ConfigError, match="NVLink sends 300 of 256"):
        Config(20, 300, 256)
    assert Config(2).get_nvl_buffer_size_hint(2 * H, 4) % 128 == 0
    assert Config(2).get_rdma_buffer_size_hint(2 * H, 4) == 0
    with pytest.raises(NotImplementedError, match="backend collective"):
        Config(2).get_rdma_buffer_size_hint(2 * H, 16)
    with limits_off():
        assert isinstance(StrictBuffer.get_combine_config(3), Config)
    assert isinstance(Buffer.get_combine_config(3), Config)
