"""Shared by tests of wrong calls of V1 and V2: one rank is wrong, and all raise in a second."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.errors import ConfigError, EPError, ShapeError

# The rank whose call is wrong.
FAULTY = 1
# Seconds from the call to the error.
LIMIT_S = 1.0

Arguments = dict[str, Any]
# Arguments that the faulty rank passes in place of the right ones, or makes of them; its error; and
# what its message says: argument, received and expected.
Case = tuple[Mapping[str, object], type[Exception], str]

# Values that no tensor argument may have.
_SPOILT: Mapping[str, Callable[[Tensor], object]] = {
    "none": lambda tensor: None,
    "list": Tensor.tolist,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "one dimension more": lambda tensor: tensor[None],
    "on meta": lambda tensor: tensor.to("meta"),
}


# The first call of a shape has ids of which one rank does not know the K of the other ranks.
UNKNOWN_TOP_K: Case = (
    {"topk_idx": lambda ids: ids[0], "topk_weights": None},
    EPError,
    r"topk_idx is \[2\].*expected",
)


def check_wrong_ids_of_a_new_shape(
    call: Callable[..., object], right: Arguments, case: Case, serves: Callable[[], None]
) -> None:
    """Check a case in the first call of a shape, and when the shape is open."""
    serves()
    for _ in range(2):
        check_case(call, right, case)
        call(**right)
    serves()


def spoilt(*names: str, optional: tuple[str, ...] = ()) -> dict[str, Case]:
    """Return the cases of tensor arguments; those that are optional may be None."""
    return {
        f"{name} {how}": ({name: spoil}, ShapeError, rf"{name} is .*expected \[")
        for name in (*names, *optional)
        for how, spoil in _SPOILT.items()
        if how != "none" or name not in optional
    }


def cut(tensor: Tensor) -> Tensor:
    return tensor[1:]


def narrow(tensor: Tensor) -> Tensor:
    return tensor[:, : tensor.shape[1] // 2].contiguous()


def codes(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def with_scales(scales: object) -> Callable[[Tensor], object]:
    return lambda x: (codes(x), scales)


def disagreeing(what: str, of_rank_0: object, of_rank_1: object, **changes: object) -> Case:
    """Return the case in which ranks differ in `what` once the faulty rank changes arguments."""
    words = f"disagree on {what}: {of_rank_0} on rank 0, {of_rank_1} on rank 1"
    return (changes, ConfigError, words)


def cases_of_ids(num_tokens: int) -> dict[str, Case]:
    """Return the cases of topk_idx [T, 2] of four experts; T of the faulty rank."""
    shape = rf"topk_idx is \[{num_tokens - 1}, 2\].*expected \[{num_tokens}, any\]"
    return {
        "ids_rows": ({"topk_idx": cut}, ShapeError, shape),
        "ids_too_large": ({"topk_idx": lambda ids: ids + 4}, ShapeError, "holds 7, expected -1 or"),
        "ids_too_small": ({"topk_idx": lambda ids: ids - 4}, ShapeError, "holds -4, expected -1 "),
    }


def cases_of_dispatch(num_tokens: int, hidden_size: int) -> dict[str, Case]:
    """Return the cases of a normal dispatch of bfloat16 rows [T, H], for V1 and V2."""
    ones = torch.ones(num_tokens, 1)
    weights = rf"topk_weights is \[{num_tokens}, 1\].*\[{num_tokens}, 2\]"
    no_k = {"topk_idx": lambda ids: ids[:, :0], "topk_weights": ones[:, :0]}
    return {
        **spoilt("x", "topk_idx"),
        **cases_of_ids(num_tokens),
        "ids_without_k": (no_k, ShapeError, rf"topk_idx is \[{num_tokens}, 0\], expected at least"),
        "x_of_one": ({"x": (1,)}, ShapeError, r"x is tuple, expected \[any, any\] torch.bfloat16"),
        "scales_none": ({"x": with_scales(None)}, ShapeError, "x is .*float8_e4m3fn.*expected"),
        "scales_dtype": (
            {"x": with_scales(ones.double())},
            ShapeError,
            rf"x\[1\] is .*float64.*expected \[{num_tokens}, any\] torch\.float32",
        ),
        "scales_of_no_block": (
            {"x": with_scales(ones[:, :0])},
            ShapeError,
            f"x has 0 scales for {hidden_size} columns, expected blocks",
        ),
        "weights_top_k": ({"topk_weights": narrow}, ShapeError, weights),
        "event_number": (
            {"previous_event": 3},
            ConfigError,
            "previous_event is int, expected EventHandle, EventOverlap or None",
        ),
        "hidden_others": disagreeing("hidden_size", hidden_size, hidden_size // 2, x=narrow),
        "top_k_others": disagreeing("top_k", 2, 1, topk_idx=narrow, topk_weights=narrow),
        "dtype_others": ({"x": with_scales(ones)}, ConfigError, "disagree on .*bf16.*, .*fp8"),
    }


def check_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    """Make a call that is wrong on one rank, and check the errors of both ranks."""
    is_faulty = dist.get_rank() == FAULTY
    dist.barrier()
    began = time.perf_counter()
    with pytest.raises(error if is_faulty or issubclass(error, EPError) else EPError) as raised:
        call()
    assert time.perf_counter() - began < LIMIT_S
    assert "rank 1" in str(raised.value)
    assert not is_faulty or raised.match(words)
    dist.barrier()


def check_case(call: Callable[..., object], right: Arguments, case: Case) -> None:
    """Make a call in which one rank changes the correct arguments according to the case."""
    changes, error, words = case
    arguments = dict(right)
    if dist.get_rank() == FAULTY:
        for name, value in changes.items():
            arguments[name] = value(right[name]) if callable(value) else value
    check_refused(lambda: call(**arguments), error, words)


def check_cases(
    cases: Mapping[str, Case],
    make: Callable[[], Arguments],
    call: Callable[..., object],
    serves: Callable[[], None],
) -> None:
    """Check all cases one after another, and after each case that correct calls work."""
    for name, case in cases.items():
        try:
            check_case(call, make(), case)
            serves()
        except BaseException as problem:
            problem.add_note(f"in the case {name}")
            raise
