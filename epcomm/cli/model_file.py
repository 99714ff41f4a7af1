"""Read the sizes of experts from the config.json of a transformers model, without transformers.

Families use different names for a size, and transformers maps the names when it loads a file.
Source: attribute_map and fields of the configurations in transformers 5.23.
"""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from epcomm.errors import ConfigError, describe_kind, shown
from epcomm.types import MAX_SIZE, is_size

# Our name -> the names of the families, in order of preference: in a model with dense layers
# intermediate_size is theirs.
_NAMES = {
    "num_experts": (
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "num_moe_experts",
    ),
    "top_k": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
        *("top_k_experts", "experts_per_token"),
    ),
    "hidden_size": ("hidden_size", "d_model"),
    "intermediate_size": (
        *("moe_intermediate_size", "expert_ffn_hidden_size"),
        *("intermediate_size", "ffn_hidden_size"),
    ),
    "dtype": ("dtype", "torch_dtype"),
}


def read_model_file(path: Path, said: Container[str] = ()) -> dict[str, Any]:
    """Return the sizes, `dtype` and `model_type` of a config.json, those that it has, by name.

    said: names of values that the user has passed. They are neither checked nor returned; they may
        have a form that is not supported, such as one number for each layer.
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
    model_type = values.get("model_type")
    found: dict[str, Any] = {"model_type": model_type if isinstance(model_type, str) else "unknown"}
    for name, known in _NAMES.items():
        value = next((values[each] for each in known if values.get(each) is not None), None)
        if value is not None and name not in said:
            _check(path, name, value)
            found[name] = value
    return found


def _read_object(path: Path, what: str, value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return value
    raise _error(path, f"{what} {describe_kind(value)}, expected an object")


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"epcomm plan: {path} {problem}; pass the config.json of a model")


def _check(path: Path, name: str, value: object) -> None:
    is_text = name == "dtype"
    if isinstance(value, str) if is_text else is_size(value):
        return
    found = describe_kind(value) if isinstance(value, list | dict) else shown(value)
    expected = "text" if is_text else f"one number for all layers, from 1 to {MAX_SIZE}"
    raise ConfigError(
        f"epcomm plan: {path} gives {name} as {found}, expected {expected}; pass "
        f"--{name.replace('_', '-')}"
    )
