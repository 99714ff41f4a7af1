"""Check the tensors of a call, so that all ranks can report what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, EPError, ShapeError
from epcomm.integrations.deep_ep.events import EventOverlap
from epcomm.integrations.deep_ep.normal import Rows, RowWay, scale_block
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v1.config import Config
from epcomm.types import is_size

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_QUANTIZED = (torch.float8_e4m3fn, torch.int8)
_IDS = (torch.int64, torch.int32)
_SCALES = (torch.float32, torch.int32)
# The number of dimensions of rows and of ids.
_MATRIX = 2
_MOST_BIASES = 2


# Name, sizes (None for any) and dtypes of a tensor, beside the tensor that came.
Rule = tuple[Tensor | None, tuple[str, tuple[int | None, ...], tuple[torch.dtype, ...]]]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Says what a tensor must be: its sizes, None for any, and its dtypes."""

    name: str
    shape: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]

    def fault(self, tensor: object, device: torch.device) -> str | None:
        """Return what is wrong with a tensor, or None."""
        if not isinstance(tensor, Tensor):
            return f"{self.name} is {type(tensor).__name__}, expected {self}"
        fits = tensor.dim() == len(self.shape) and all(
            size in (None, found) for size, found in zip(self.shape, tensor.shape, strict=True)
        )
        if fits and tensor.dtype in self.dtypes and tensor.device.type == device.type:
            return None
        found = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        return f"{self.name} is {found}, expected {self} on {device.type}"

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"[{sizes}] {' or '.join(map(str, self.dtypes))}"


def rows_fault(rows: Rows, device: torch.device) -> str | None:
    """Return what is wrong with x and its scales, or None."""
    dtypes = _PLAIN if rows.scales is None else _QUANTIZED
    fault = Expected(name="x", shape=(None, None), dtypes=dtypes).fault(rows.x, device)
    if fault is not None or rows.scales is None:
        return fault
    shape = (rows.x.shape[0], None)
    fault = Expected(name="x[1]", shape=shape, dtypes=_SCALES).fault(rows.scales, device)
    if fault is not None:
        return fault
    hidden_size, num_scales = rows.x.shape[1], rows.scales.shape[-1]
    if scale_block(hidden_size, num_scales) is None:
        return (
            f"x has {num_scales} scales for {hidden_size} columns, expected blocks of one length, "
            "such as a scale for each 128 columns"
        )
    return None


def options_error(
    ranks: Ranks, function: str, config: object, least: Mapping[str, tuple[object, int]]
) -> EPError | None:
    """Find what is wrong with a Config and with numbers. Local.

    least: argument -> its value, and the smallest that is right.
    """
    wrong = [
        f"{name} is {value}, expected an integer of at least {smallest}"
        for name, (value, smallest) in least.items()
        if not isinstance(value, int) or value < smallest
    ]
    if not isinstance(config, Config):
        wrong.append(f"config is {type(config).__name__}, expected Config or None")
    if not wrong:
        return None
    return ConfigError(f"{function}: {wrong[0]} ({ranks.where}); correct it on this rank")


def ids_error(
    ranks: Ranks, function: str, topk_ids: Tensor | None, num_experts: int
) -> EPError | None:
    """Find ids that name no expert, where the host reads them: on CPUs. Local."""
    if topk_ids is None or not ranks.reads_faults or not topk_ids.numel():
        return None
    lowest, highest = (int(each) for each in topk_ids.aminmax())
    if lowest >= -1 and highest < num_experts:
        return None
    wrong = lowest if lowest < -1 else highest
    fault = f"topk_idx holds {wrong}, expected -1 or 0 to {num_experts - 1}"
    return _error(function, fault, ranks)


def event_error(
    ranks: Ranks, function: str, event: EventOverlap | None, is_async: bool, allocates_here: bool
) -> EPError | None:
    """Find what is wrong with the arguments of the communication stream. Local."""
    if event is not None and not isinstance(event, EventOverlap):
        return ConfigError(
            f"{function}: previous_event is {type(event).__name__}, expected EventOverlap or None "
            f"({ranks.where}); pass Buffer.capture()"
        )
    if not allocates_here or (is_async and event is not None and event.event is not None):
        return None
    return ConfigError(
        f"{function}: allocate_on_comm_stream=True came without previous_event or without "
        f"async_finish=True, expected both ({ranks.where}); pass Buffer.capture() and "
        "async_finish=True"
    )


def dispatch_error(
    ranks: Ranks,
    rows: Rows,
    topk: tuple[Tensor | None, Tensor | None],
    is_in_rank: Tensor | None,
    per_expert: Tensor | None,
) -> EPError | None:
    """Find what is wrong with a normal dispatch. Local."""
    if _is_usual(rows, topk, is_in_rank, ranks) and _divides(per_expert, ranks):
        return (
            None if per_expert is None else ids_error(ranks, "dispatch", topk[0], len(per_expert))
        )
    fault = rows_fault(rows, ranks.device)
    if fault is None:
        num_tokens, (ids, weights) = rows.x.shape[0], topk
        expected: list[Rule] = [
            (is_in_rank, ("is_token_in_rank", (num_tokens, ranks.size), (torch.bool,))),
            (per_expert, ("num_tokens_per_expert", (None,), (torch.int32,))),
        ]
        if ids is not None or weights is not None:
            top_k = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else None
            expected += [
                (ids, ("topk_idx", (num_tokens, None), _IDS)),
                (weights, ("topk_weights", (num_tokens, top_k), (torch.float32,))),
            ]
        fault = _first_fault(expected, ranks.device)
    if fault is None and per_expert is not None and not _divides(per_expert, ranks):
        fault = (
            f"num_tokens_per_expert has {per_expert.shape[0]} entries, expected a multiple of the "
            f"{ranks.size} ranks"
        )
    if fault is None and topk[0] is not None and topk[0].shape[1] == 0:
        fault = f"topk_idx is {list(topk[0].shape)}, expected at least one expert a token"
    if fault is not None or per_expert is None:
        return _error("dispatch", fault, ranks)
    return ids_error(ranks, "dispatch", topk[0], len(per_expert))


def worst_error(ranks: Ranks, rows: Rows, num_worst_tokens: int) -> EPError | None:
    """Find more tokens than the static sizes of num_worst_tokens have memory for. Local."""
    if rows.x.shape[0] <= num_worst_tokens:
        return None
    return CapacityError(
        f"dispatch: x has {rows.x.shape[0]} tokens, expected at most num_worst_tokens = "
        f"{num_worst_tokens} ({ranks.where}); pass a larger number on all ranks"
    )


def combine_error(
    ranks: Ranks,
    x: Tensor,
    sizes: tuple[int, int, int],
    topk_weights: Tensor | None,
    biases: Sequence[Tensor],
    way: RowWay,
) -> EPError | None:
    """Find what is wrong with a normal combine; sizes: R, H and T. Local."""
    (num_rows, hidden_size, num_tokens), dtypes = sizes, (way.sum_dtype,)
    expected: list[Rule] = [(x, ("x", (num_rows, hidden_size), dtypes))]
    if topk_weights is not None:
        shape = (num_rows, way.top_k)
        expected.append((topk_weights, ("topk_weights", shape, (torch.float32,))))
    if len(biases) > _MOST_BIASES:
        fault = f"bias is a tuple of {len(biases)}, expected two tensors at most"
        return _error("combine", fault, ranks)
    for bias in biases:
        expected.append((bias, ("bias", (num_tokens, hidden_size), dtypes)))
    return _error("combine", _first_fault(expected, ranks.device), ranks)


def low_latency_dispatch_error(
    ranks: Ranks, x: Tensor, topk_ids: Tensor, max_tokens: int, num_experts: int
) -> EPError | None:
    """Find what is wrong with a low-latency dispatch. Local."""
    function = "low_latency_dispatch"
    # First what holds in all calls but wrong ones: decoding counts microseconds of the host.
    if (
        isinstance(x, Tensor)
        and isinstance(topk_ids, Tensor)
        and x.dim() == topk_ids.dim() == _MATRIX
        and x.dtype is torch.bfloat16
        and topk_ids.dtype in _IDS
        and is_size(max_tokens)
        and is_size(num_experts)
        and topk_ids.shape[0] == x.shape[0] <= max_tokens
        and x.shape[1] > 0
        and num_experts % ranks.size == 0
        and x.device == topk_ids.device == ranks.device
    ):
        return ids_error(ranks, function, topk_ids, num_experts)
    expected: list[Rule] = [
        (x, ("x", (None, None), (torch.bfloat16,))),
        (topk_ids, ("topk_idx", (_length_of(x), None), _IDS)),
    ]
    fault = _first_fault(expected, ranks.device)
    if fault is None and x.shape[1] == 0:
        fault = f"x is {list(x.shape)}, expected at least one column"
    if fault is None and not is_size(max_tokens):
        fault = f"num_max_dispatch_tokens_per_rank is {max_tokens}, expected a positive integer"
    if fault is None and (not is_size(num_experts) or num_experts % ranks.size):
        fault = f"num_experts is {num_experts}, expected a multiple of the {ranks.size} ranks"
    if fault is not None:
        return _error(function, fault, ranks)
    if x.shape[0] <= max_tokens:
        return ids_error(ranks, function, topk_ids, num_experts)
    return CapacityError(
        f"{function}: x has {x.shape[0]} tokens, expected at most num_max_dispatch_tokens_per_rank "
        f"= {max_tokens} ({ranks.where}); pass a larger number on all ranks"
    )


def low_latency_combine_error(
    ranks: Ranks,
    x: Tensor,
    topk: tuple[Tensor, Tensor],
    shapes: tuple[tuple[int, int, int], int],
    out: Tensor | None,
) -> EPError | None:
    """Find what is wrong with a low-latency combine; shapes: of the slabs, and T. Local."""
    (ids, weights), (slabs, num_tokens) = topk, shapes
    if (
        all(isinstance(each, Tensor) for each in (x, ids, weights))
        and x.shape == slabs
        and x.dtype is torch.bfloat16
        and ids.dtype in _IDS
        and ids.shape == weights.shape
        and len(ids.shape) == _MATRIX
        and ids.shape[0] == num_tokens
        and weights.dtype is torch.float32
        and x.device == ids.device == weights.device == ranks.device
        and out is None
    ):
        return None
    top_k = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else None
    expected: list[Rule] = [
        (x, ("x", slabs, (torch.bfloat16,))),
        (ids, ("topk_idx", (num_tokens, None), _IDS)),
        (weights, ("topk_weights", (num_tokens, top_k), (torch.float32,))),
    ]
    if out is not None:
        expected.append((out, ("out", (num_tokens, slabs[2]), (torch.bfloat16,))))
    return _error("low_latency_combine", _first_fault(expected, ranks.device), ranks)


def stats_error(ranks: Ranks, stats: Tensor | None, num_local: int) -> EPError | None:
    """Find what is wrong with cumulative_local_expert_recv_stats. Local."""
    if stats is None:
        return None
    expected: list[Rule] = [
        (stats, ("cumulative_local_expert_recv_stats", (num_local,), (torch.int32,)))
    ]
    return _error("low_latency_dispatch", _first_fault(expected, ranks.device), ranks)


def cached_error(
    ranks: Ranks, rows: Rows, sizes: tuple[int, int, int], way: RowWay
) -> EPError | None:
    """Find what is wrong with rows for a way that exists; sizes: R, H and T. Local."""
    fault = rows_fault(rows, ranks.device)
    if fault is None and rows.x.shape != (sizes[2], sizes[1]):
        fault = f"x is {list(rows.x.shape)}, expected [{sizes[2]}, {sizes[1]}], as in the dispatch"
    return _error("dispatch", fault or way.fault(rows), ranks)


def scale_error(ranks: Ranks, is_wrong: bool) -> EPError | None:
    """Refuse to pack scales that are no powers of two. Local."""
    if not is_wrong:
        return None
    return ConfigError(
        "low_latency_dispatch: use_ue8m0=True came with round_scale=False, expected "
        f"round_scale=True ({ranks.where}); only powers of two fit into a byte"
    )


def hook_error(ranks: Ranks, function: str, *, is_async: bool, with_hook: bool) -> EPError | None:
    """Refuse an event and a hook for one call. Local."""
    if not (is_async and with_hook):
        return None
    return ConfigError(
        f"{function}: async_finish and return_recv_hook are both True, expected one at most "
        f"({ranks.where}); take the hook, which is where the call ends"
    )


def _is_usual(
    rows: Rows,
    topk: tuple[Tensor | None, Tensor | None],
    is_in_rank: Tensor | None,
    ranks: Ranks,
) -> bool:
    """Return quickly whether the tensors of a dispatch have the usual form."""
    x, scales, (ids, weights) = rows.x, rows.scales, topk
    if not all(isinstance(each, Tensor) for each in (x, ids, weights, is_in_rank)):
        return False
    assert ids is not None, "just checked"
    assert weights is not None, "just checked"
    assert is_in_rank is not None, "just checked"
    return (
        x.dim() == ids.dim() == _MATRIX
        and (
            x.dtype in _PLAIN
            if scales is None
            else x.dtype in _QUANTIZED
            and isinstance(scales, Tensor)
            and scales.dim() == _MATRIX
            and scales.shape[0] == x.shape[0]
            and scales.dtype in _SCALES
            and scale_block(x.shape[1], scales.shape[1]) is not None
            and scales.device == x.device
        )
        and ids.dtype in _IDS
        and weights.dtype is torch.float32
        and ids.shape == weights.shape
        and ids.shape[0] == x.shape[0]
        and ids.shape[1] > 0
        and is_in_rank.dtype is torch.bool
        and is_in_rank.shape == (x.shape[0], ranks.size)
        and x.device == ids.device == weights.device == is_in_rank.device == ranks.device
    )


def _length_of(x: object) -> int | None:
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else None


def _divides(per_expert: Tensor | None, ranks: Ranks) -> bool:
    return (
        isinstance(per_expert, Tensor)
        and per_expert.dtype is torch.int32
        and per_expert.dim() == 1
        and per_expert.shape[0] > 0
        and per_expert.shape[0] % ranks.size == 0
    )


def _first_fault(expected: Sequence[Rule], device: torch.device) -> str | None:
    found = (
        Expected(name=name, shape=shape, dtypes=dtypes).fault(tensor, device)
        for tensor, (name, shape, dtypes) in expected
    )
    return next((fault for fault in found if fault is not None), None)


def _error(function: str, fault: str | None, ranks: Ranks) -> EPError | None:
    if fault is None:
        return None
    return ShapeError(f"{function}: {fault} ({ranks.where}); correct the argument on this rank")
