"""Check the arguments of a call of deep_ep, so that all ranks can report what is wrong."""

from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError, ShapeError
from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap
from epcomm.integrations.deep_ep.normal import RowExchange, Rows, XTensors, scale_block
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.spec import BufferSpec
from epcomm.types import is_size

Shape = tuple[int | None, ...]
Dtypes = tuple[torch.dtype, ...]

IDS: Dtypes = (torch.int64, torch.int32)
FLOAT32: Dtypes = (torch.float32,)
# Scales are opaque words of four bytes.
_SCALES: Dtypes = (torch.float32, torch.int32, torch.uint32)


class MissingArgumentError(ConfigError, NotImplementedError):
    """A call asks for an argument of deep_ep that the drop-in does not have."""


class Check:
    """Checks the arguments of one call on this rank; local, before anything is sent.

    Each method but error() raises an EPError that names the argument and this rank.

    spec: of the buffer of a dispatch, as soon as its arguments determine it; its K is 0 if neither
        ids nor weights have T rows.
    """

    def __init__(self, function: str, ranks: Ranks, like: object = None) -> None:
        """Begin a call, if the buffer is not destroyed; its tensors are where `like` is."""
        ranks.check_open(function)
        if isinstance(like, Tensor):
            ranks.follow(like.device)
        self.function, self.ranks, self._device = function, ranks, ranks.device
        self.spec: BufferSpec | None = None

    def error(
        self, kind: type[EPError], fault: str, remedy: str = "correct it on this rank"
    ) -> EPError:
        return kind(f"{self.function}: {fault} ({self.ranks.where}); {remedy}")

    def tensor(self, name: str, tensor: object, shape: Shape, dtypes: Dtypes) -> None:
        """Require a tensor of one of these dtypes on the device; shape: None for any size."""
        # Correct calls return first, because decoding counts microseconds of the host.
        if (
            isinstance(tensor, Tensor)
            and tensor.dtype in dtypes
            # Comparing types takes four times as long.
            and (tensor.device == self._device or tensor.device.type == self._device.type)
            and _fits(tensor.shape, shape)
        ):
            return
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        expected = f"[{sizes}] {' or '.join(map(str, dtypes))}"
        found = type(tensor).__name__
        if isinstance(tensor, Tensor):
            found = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            expected = f"{expected} on {self._device.type}"
        raise self.error(ShapeError, f"{name} is {found}, expected {expected}")

    def rows(self, rows: Rows, shape: Shape, plain: Dtypes, quantized: Dtypes) -> None:
        """Require rows; plain, quantized: dtypes without scales, and with scales."""
        self.tensor("x", rows.x, shape, plain if rows.scales is None else quantized)
        if rows.scales is None:
            return
        num_rows, hidden_size = rows.x.shape
        self.tensor("x[1]", rows.scales, (num_rows, None), _SCALES)
        num_scales = rows.scales.shape[1]
        if scale_block(hidden_size, num_scales) is None:
            fault = f"x has {num_scales} scales for {hidden_size} columns, expected blocks of one"
            raise self.error(ShapeError, f"{fault} length, such as a scale for each 128 columns")

    def rows_along(
        self, rows: Rows, exchange: RowExchange, plain: Dtypes, quantized: Dtypes
    ) -> None:
        """Require rows of the tokens of an exchange that fit into its memory."""
        self.rows(rows, (exchange.num_tokens, exchange.spec.hidden_size), plain, quantized)
        if rows.row_bytes > exchange.row_bytes:
            fault = f"x is {rows.x.dtype}, whose rows take {rows.row_bytes} bytes with their scales"
            fault = f"{fault}, expected at most {exchange.row_bytes}, as in the dispatch"
            raise self.error(ShapeError, fault, "convert it with .to()")

    @staticmethod
    def top_k(num_tokens: int, *topk: object) -> int:
        """Return K if ids or weights are [T, K], whatever else is wrong with them; else 0."""
        for each in topk:
            if isinstance(each, Tensor) and each.dim() == 2 and each.shape[0] == num_tokens:
                return each.shape[1]
        return 0

    def ids(self, topk_ids: Tensor, num_experts: int) -> None:
        """Require at least one id per token; on CPUs the host also checks each id."""
        if topk_ids.shape[1] == 0:
            fault = f"topk_idx is {list(topk_ids.shape)}, expected at least one expert a token"
            raise self.error(ShapeError, fault)
        if not self.ranks.reads_faults or not topk_ids.numel():
            return
        lowest, highest = (int(each) for each in topk_ids.aminmax())
        if lowest < -1 or highest >= num_experts:
            wrong = lowest if lowest < -1 else highest
            fault = f"topk_idx holds {wrong}, expected -1 or 0 to {num_experts - 1}"
            raise self.error(ShapeError, fault)

    def num_tokens(self, num_tokens: int, limit: str, most: int) -> None:
        """Require at most as many tokens as the argument `limit`."""
        if num_tokens > most:
            fault = f"x has {num_tokens} tokens, expected at most {limit} = {most}"
            raise self.error(CapacityError, fault, "pass a larger number on all ranks")

    def recv_stats(self, stats: Tensor | None, num_local: int) -> None:
        """Require counts of the experts of this rank, or None."""
        if stats is not None:
            self.tensor("cumulative_local_expert_recv_stats", stats, (num_local,), (torch.int32,))

    def biases(self, bias: XTensors | None, exchange: RowExchange) -> tuple[Tensor, ...]:
        """Require none, one or two tensors that the sums of an exchange begin with; return them."""
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        if len(biases) > 2:
            fault = f"bias is a tuple of {len(biases)}, expected two tensors at most"
            raise self.error(ShapeError, fault, "add them up")
        shape = (exchange.num_tokens, exchange.spec.hidden_size)
        for bias in biases:
            self.tensor("bias", bias, shape, (exchange.sum_dtype,))
        return biases

    def num_local_experts(self, num_experts: object, kind: type[EPError]) -> int:
        """Require a multiple of the ranks; return L."""
        if not is_size(num_experts) or num_experts % self.ranks.size:
            fault = f"num_experts is {num_experts}, expected a multiple of {self.ranks.size} ranks"
            raise self.error(kind, fault, "pass the number of experts of all ranks")
        return num_experts // self.ranks.size

    def size(self, name: str, size: object, kind: type[EPError] = ConfigError) -> None:
        if not is_size(size):
            fault = f"{name} is {size}, expected a positive integer"
            raise self.error(kind, fault, "pass the same on all ranks")

    def number(self, name: str, number: object) -> None:
        """Require an integer of at least 0."""
        if not isinstance(number, int | Integral) or number < 0:
            fault = f"{name} is {number!r}, expected an integer of at least 0"
            raise self.error(ConfigError, fault, "pass 0 for the default")

    def event(self, name: str, event: object) -> None:
        """Require an event of either kind, or None."""
        if event is not None and not isinstance(event, EventHandle | EventOverlap):
            fault = f"{name} is {type(event).__name__}, expected EventHandle, EventOverlap or None"
            raise self.error(ConfigError, fault, "pass what capture() of the buffer returns")

    def handle_error(self, handle: object, maker: str) -> EPError:
        """Return the error of a handle that `maker` did not return."""
        fault = f"handle is {type(handle).__name__}, expected what {maker} returned"
        return self.error(HandleError, fault, "pass it as it is, without a copy")

    def absent(self, **given: object) -> None:
        """Refuse arguments that are not None or False."""
        for name, value in given.items():
            if value is not None and value is not False:
                argument = f"{name}=True" if value is True else name
                fault = f"{argument} is not available in epcomm.integrations.deep_ep"
                remedy = "leave it out, and see docs/migrating_from_deepep.md for what to use"
                raise self.error(MissingArgumentError, fault, remedy)


def _fits(found: torch.Size, shape: Shape) -> bool:
    if found == shape or len(found) != len(shape):
        return found == shape
    sizes = zip(found, shape, strict=True)
    return all(expected is None or size == expected for size, expected in sizes)


class Absent:
    """A method of deep_ep that the drop-in does not have: it refuses any arguments.

    use: the replacement, for the message.
    """

    def __init__(self, use: str) -> None:
        self._name, self._use = "", use

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} is not available in epcomm.integrations.deep_ep, which moves tokens to "
            f"experts within one host; {self._use}"
        )
