"""Read the sizes of experts from the config.json of a transformers model, without transformers.

Families use different names for a size, and transformers maps the names when it loads a file.
Source: attribute_map and fields of the configurations in transformers 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from epcomm.errors import ConfigError, describe_kind, shown
from epcomm.types import MAX_SIZE, is_size

# Our name -> the names of the families, in order of preference: in a model with dense layers
# intermediate_size is theirs.
_NAMES = {
    "num_experts": (
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_moe_experts",
    ),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
        "experts_per_token",
    ),
    "hidden_size": ("hidden_size", "d_model"),
    "intermediate_size": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "intermediate_size",
        "ffn_hidden_size",
    ),
    "dtype": ("dtype", "torch_dtype"),
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes in a file; None for those that it does not have.

    model_type: the family.
    """

    model_type: str
    hidden_size: int | None
    num_experts: int | None
    top_k: int | None
    intermediate_size: int | None
    dtype: str | None


def read_model_file(path: Path, said: Container[str] = ()) -> ModelShape:
    """Read a config.json.

    Args:
        path: the file.
        said: fields of ModelShape that the user has passed, whose values in the file are not
            checked, such as one number for each layer.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or has an invalid size.
    """
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _error(path, f"is not JSON ({error})") from None
    except RecursionError:
        raise _error(path, "is nested too deeply") from None
    values = _read_object(path, "holds", values)
    # A multimodal model has a separate record of its language model. Null counts as absent.
    if values.get("text_config") is not None:
        values = _read_object(path, "gives text_config as", values["text_config"])
    numbers = {
        name: None if name in said else _read_number(path, name, values)
        for name in _NAMES
        if name != "dtype"
    }
    dtype = _read(values, "dtype")
    if not isinstance(dtype, str | None) and "dtype" not in said:
        raise ConfigError(
            f"epcomm plan: {path} gives dtype as {describe_kind(dtype)}, expected text; "
            "pass --dtype"
        )
    model_type = values.get("model_type")
    return ModelShape(
        model_type=model_type if isinstance(model_type, str) else "unknown",
        dtype=dtype if isinstance(dtype, str) else None,
        **numbers,
    )


def _read_object(path: Path, what: str, value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise _error(path, f"{what} {describe_kind(value)}, expected an object")


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"epcomm plan: {path} {problem}; pass the config.json of a model")


def _read(values: dict[str, object], name: str) -> object:
    found = (values[known] for known in _NAMES[name] if values.get(known) is not None)
    return next(found, None)


def _read_number(path: Path, name: str, values: dict[str, object]) -> int | None:
    value = _read(values, name)
    if value is None or is_size(value):
        return value
    found = describe_kind(value) if isinstance(value, list | dict) else shown(value)
    raise ConfigError(
        f"epcomm plan: {path} gives {name} as {found}, expected one number for all layers, from 1 "
        f"to {MAX_SIZE}; pass --{name.replace('_', '-')}"
    )
