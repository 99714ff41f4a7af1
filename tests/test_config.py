import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from epcomm import ConfigError, EPConfig, Int8Profile, Mode, ScaleDtype, WireDtype
from epcomm.config import Router

MODES = "['standard', 'normal', 'low_latency', 'auto', 'fuseep']"
DTYPES = sorted(dtype.value for dtype in WireDtype if dtype is not WireDtype.LOGFMT10)
FIELDS = sorted(field.name for field in dataclasses.fields(EPConfig))
BAD_VALUES: list[tuple[dict[str, object], str]] = [
    ({"mode": "fast"}, f"mode is 'fast', expected one of {MODES}"),
    ({"dispatch_dtype": "logfmt10"}, f"dispatch_dtype is 'logfmt10', expected one of {DTYPES}, or"),
    ({"dispatch_dtype": "tf32"}, f"dispatch_dtype is 'tf32', expected one of {DTYPES}"),
    ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0, expected 1 to 2147483647, or None"),
    ({"timeout_s": 0}, "timeout_s is 0, expected seconds"),
    # Values of wrong types that a file may have instead of a number, a bool or a name.
    ({"max_tokens_per_rank": "128"}, "max_tokens_per_rank is '128', expected"),
    ({"timeout_s": float("nan")}, "timeout_s is nan, expected"),
    ({"deterministic": "no"}, "deterministic is 'no', expected"),
    ({"runner": 3}, "runner is 3, expected"),
    (
        {"mode": "normal", "max_token": 8, "bckend": "auto"},
        f"mapping has unknown fields ['bckend', 'max_token']; known are {FIELDS}",
    ),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES)
def test_bad_value_is_named_with_what_was_expected(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"EPConfig: {message}")):
        EPConfig.from_mapping(values)


def test_strings_become_enums() -> None:
    config = EPConfig.from_mapping(
        {"mode": "low_latency", "router": "ascend", "dispatch_dtype": "fp8_e4m3"}
    )
    assert config.mode is Mode.LOW_LATENCY
    assert config.router is Router.ASCEND
    assert config.dispatch_dtype is WireDtype.FP8_E4M3


VALUES = {
    "mode": "normal",
    "dispatch_scales": "power_of_two",
    "int8_profile": "div",
    "max_tokens_per_rank": 128,
    "timeout_s": 2.5,
    "deterministic": True,
}
TEXTS = {
    "config.json": json.dumps(VALUES),
    "config.toml": 'mode = "normal"\ndispatch_scales = "power_of_two"\nint8_profile = "div"\n'
    "max_tokens_per_rank = 128\n"
    "timeout_s = 2.5\ndeterministic = true\n",
    "config.yaml": "mode: normal\ndispatch_scales: power_of_two\nint8_profile: div\n"
    "max_tokens_per_rank: 128\ntimeout_s: 2.5\ndeterministic: true\n",
    "config.yml": f"# JSON is YAML\n{json.dumps(VALUES)}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_file_holds_the_fields(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(TEXTS[name])
    assert EPConfig.from_file(path) == EPConfig.from_file(str(path)) == EPConfig(**VALUES)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.ini", "mode: normal", "config.ini does not end in one of .toml, .json, .yaml"),
        ("config.yaml", "1: 2", "config.yaml has unknown fields ['1']; known are"),
        ("config.toml", "tokens = 1", "config.toml has unknown fields ['tokens']; known are"),
    ],
)
def test_bad_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        EPConfig.from_file(tmp_path / name)


def test_environment_is_read_by_an_explicit_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EPCOMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EPCOMM_MODE", "standard")
    monkeypatch.setenv("EPCOMM_MAX_TOKENS_PER_RANK", "64")
    monkeypatch.setenv("EPCOMM_TIMEOUT_S", "1.5")
    monkeypatch.setenv("EPCOMM_DISPATCH_SCALES", "float32")
    monkeypatch.setenv("EPCOMM_INT8_PROFILE", "triton")
    monkeypatch.setenv("EPCOMM_CHECK_CALLS", "True")
    monkeypatch.setenv("EPCOMM_DETERMINISTIC", "0")
    monkeypatch.setenv("EPCOMM_ROUTER", "reference")

    assert EPConfig() == EPConfig(mode="auto")
    assert EPConfig.from_env() == EPConfig(
        mode="standard",
        router="reference",
        dispatch_scales=ScaleDtype.FLOAT32,
        int8_profile=Int8Profile.TRITON,
        max_tokens_per_rank=64,
        timeout_s=1.5,
        check_calls=True,
    )
    assert EPConfig.from_env({"MODE": "normal", "EPCOMM_RUNNER": "reference"}) == EPConfig(
        runner="reference"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("EPCOMM_TOKENS", "1", "the environment has unknown fields ['tokens']; known are"),
        ("EPCOMM_NUM_SMS", "8.5", "EPCOMM_NUM_SMS is '8.5', which does not parse"),
        ("EPCOMM_TIMEOUT_S", "soon", "EPCOMM_TIMEOUT_S is 'soon', which does not parse"),
        ("EPCOMM_CHECK_CALLS", "yes", "EPCOMM_CHECK_CALLS is 'yes', which does not parse"),
        ("EPCOMM_MAX_RECV_SLOTS", "0", "max_recv_slots is 0"),
    ],
)
def test_bad_variable_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EPConfig.from_env({name: text})
