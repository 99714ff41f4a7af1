"""Define the contract of a runner: from a DispatchOutput to the CombineInput of its layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, final, overload
from weakref import ref

import torch

from epcomm.errors import ConfigError, ShapeError
from epcomm.platforms.machine import Machine, this_machine
from epcomm.quantization import KNOWN_FORMATS, check_scales
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    MaskedCombineInput,
    MaskedDispatchOutput,
    RowsCombineInput,
    RowsDispatchOutput,
    SlotIndex,
)
from epcomm.spec import Availability
from epcomm.types import (
    QUANTIZABLE_DTYPES,
    Int8Profile,
    Layout,
    RowReading,
    WeightsAppliedBy,
    WireDtype,
    WireFormat,
    WireTensor,
)
from epcomm.weights.unquantized import ExpertTensors

# More than the number of receive buffers of the layers that share a runner.
_MOST_PASSED = 64
# Products of two codes, each at most 128**2, whose sum fits int32.
_MAX_SUMMANDS = (2**31 - 1) // 128**2


@dataclass(frozen=True, kw_only=True)
class BatchInvariance:
    """The answer whether the bits of a row depend on the number, positions or values of others.

    reasons: why they may depend on them; empty if they do not.
    rests_on: what must be equal wherever bits are compared, as text.
    """

    reasons: tuple[str, ...] = ()
    rests_on: str = ""

    @classmethod
    def of_cpu(cls, machine: Machine, treats_rows_alike: bool) -> BatchInvariance:
        """Return whether rows depend on others in products of fixed shapes, in this process.

        treats_rows_alike: whether equal rows have had equal results at all positions of a product.
        """
        instructions = torch.backends.cpu.get_cpu_capability()
        threads = torch.get_num_threads()
        if not treats_rows_alike:
            return cls(
                reasons=(
                    "the bits of a row depend on its position in a product of these sizes, with "
                    f"{threads} threads and {instructions}; take another dtype or number of "
                    "threads (torch.set_num_threads())",
                )
            )
        cpu = f"{instructions}, {threads} threads"
        if machine.find_version("torch") is None:
            # An assumed machine.
            cpu = "the instructions and the number of threads"
        return cls(rests_on=f"{_version(machine, 'torch')}, {cpu}")

    @classmethod
    def of_gpu(cls, machine: Machine, device: torch.device, compiler: str) -> BatchInvariance:
        """Return that rows do not depend on others, in kernels of a compiler on a GPU."""
        versions = f"{_version(machine, 'torch')}, {_version(machine, compiler)}"
        major, minor = machine.capability(device)
        return cls(rests_on=f"{versions}, compute capability {major}.{minor}")


def _version(machine: Machine, name: str) -> str:
    version = machine.find_version(name)
    return f"the version of {name}" if version is None else f"{name} {version}"


class ExpertRunner(ABC):
    """Computes the local experts of one layer.

    kinds: kinds of experts that the runner computes.   layouts: layouts of rows that it reads.
    wire_dtypes: dtypes of rows that it reads besides that of the experts' own wire format; by
        default those that are quantised on arrival, to the same values as before they are sent.
    expert_alignment: the slots of an expert must start at a multiple of this; in MASKED this makes
        the capacity of an expert a multiple of it.
    int8_profiles: arithmetics that the runner has between the products of INT8 experts.
    note: what explain() says about the runner beside its name; empty for nothing.
    is_for_sum_groups: without EPConfig.sum_groups a plan takes the runner by name alone.
    has_gradients: results are differentiable; else run() refuses rows and experts that need it,
        and records that its kernels would misread.
    has_limit: products of GPUs obey product_sms, EPConfig.product_sms, which the layer sets.
    """

    name: ClassVar[str]
    note: ClassVar[str] = ""
    kinds: ClassVar[tuple[type[ExpertTensors], ...]]
    layouts: ClassVar[frozenset[Layout]]
    wire_dtypes: ClassVar[frozenset[WireDtype]] = QUANTIZABLE_DTYPES
    expert_alignment: ClassVar[int] = 1
    int8_profiles: ClassVar[frozenset[Int8Profile]] = frozenset({Int8Profile.RINT127})
    is_for_sum_groups: ClassVar[bool] = False
    has_gradients: ClassVar[bool] = False
    has_limit: ClassVar[bool] = False
    product_sms: int | None = None

    def __init__(self, *, int8_profile: Int8Profile = Int8Profile.RINT127) -> None:
        """Keep the arithmetic that the plan chose; int8_profile is one of int8_profiles."""
        self.int8_profile = int8_profile
        # Rows that _check_rows() has accepted, by id, with their experts. Buffers return the same
        # record of rows repeatedly.
        self._passed: dict[int, tuple[ref[WireTensor], ref[ExpertTensors]]] = {}

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        """Return whether a machine has the runner's packages and device. Local; for doctor()."""
        return Availability(ok=True)

    @final
    @classmethod
    def supports(cls, weights: ExpertTensors, machine: Machine | None = None) -> Availability:
        """Return whether the runner can compute these experts. Local; pure.

        machine: the machine that would hold the experts; None: this machine.
        """
        if isinstance(weights, cls.kinds):
            reasons = cls._reasons(weights, machine or this_machine())
        else:
            computed = ", ".join(kind.__name__ for kind in cls.kinds)
            reasons = [f"computes {computed}, not {type(weights).__name__}"]
        return Availability(ok=not reasons, reasons=tuple(reasons))

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        """Return why the runner refuses experts of its kinds; empty if it computes them."""
        return []

    @classmethod
    def limit_reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        """Return why products of a GPU exceed product_sms; empty if they obey. Local."""
        return [] if cls.has_limit else ["its products cannot obey EPConfig.product_sms"]

    @classmethod
    def is_candidate(cls, weights: ExpertTensors) -> bool:
        """Return whether plans that name no runner should ask this one, by default by kind.

        Local; pure.
        """
        return isinstance(weights, cls.kinds)

    @classmethod
    def batch_invariance(cls, weights: ExpertTensors, machine: Machine) -> BatchInvariance:
        """Return whether the bits of a row depend on other rows, for experts that it computes.

        If they do not, a row has the same result, and the same gradient for the same gradient of
        the result, alone and in every batch, in all layouts that the runner reads.
        EPConfig.sum_groups takes no other runner. Local.
        """
        return BatchInvariance(
            reasons=("the bits of a row may depend on other rows, but EPConfig.sum_groups is set",)
        )

    @classmethod
    def readings(cls, weights: ExpertTensors, layout: Layout) -> tuple[RowReading, ...]:
        """Return the wire formats and scale layouts that the runner reads for these experts.

        By default the experts' own wire format, and all known formats of the other wire_dtypes;
        with row-major scales. Local; pure.
        """
        wanted = weights.wire_format
        return row_major_readings(cls.wire_dtypes | {wanted.dtype}, wanted)

    @classmethod
    def _check_rows(cls, rows: WireTensor, weights: ExpertTensors, layout: Layout) -> None:
        """Refuse rows of another format or dtype, or with other scales, than run() reads."""
        readings = {each.format: each for each in cls.readings(weights, layout)}
        reading, wire = readings.get(rows.format), rows.format
        if reading is None or rows.data.dtype != wire.dtype.torch_dtype:
            expected = ", ".join(
                f"{each} ({each.dtype.torch_dtype}, scales {each.scale_dtype})" for each in readings
            )
            raise ShapeError(
                f"{cls.name}: rows are {wire} ({rows.data.dtype}, scales {wire.scale_dtype}), "
                f"expected one of {expected} for {type(weights).__name__}; dispatch with a plan "
                "made for this runner"
            )
        if wire.dtype.is_quantized:
            check_scales(rows, reading.scale_layout, caller=cls.name)

    @classmethod
    def _check_sizes(cls, dispatched: DispatchOutput, weights: ExpertTensors) -> None:
        """Refuse another H or L than the experts have, or router weights that are missing."""
        rows, counts = dispatched.hidden_states, dispatched.num_tokens_per_expert
        hidden_size, wanted = rows.hidden_size, weights.hidden_size
        if hidden_size != wanted:
            raise ShapeError(
                f"{cls.name}: rows are {list(rows.data.shape)}, so H is {hidden_size}, expected "
                f"{wanted} of the experts; dispatch with a plan made for these experts"
            )
        shape = counts.shape
        held = rows.data.shape[:1] if dispatched.layout is Layout.MASKED else shape
        if shape != (weights.num_experts,) or held != shape:
            raise ShapeError(
                f"{cls.name}: num_tokens_per_expert is {list(counts.shape)} for rows "
                f"{list(rows.data.shape)}, expected [{weights.num_experts}], one for each of the "
                "experts; pass the experts of this rank alone"
            )
        slot_weights_to_apply(dispatched, cls.name)

    @overload
    def run(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> RowsCombineInput: ...

    @overload
    def run(
        self, dispatched: MaskedDispatchOutput, weights: ExpertTensors
    ) -> MaskedCombineInput: ...

    @final
    def run(self, dispatched: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        """Compute each slot with its expert, and weight the result if the runner applies weights.

        Rows and slots past the counts do not affect any result. Differentiable in rows,
        slot_weights and weights, where has_gradients. Local.

        Raises:
            ShapeError: a layout that it does not read; or, without gradients, rows, sizes or router
                weights that its kernels would misread.
            ConfigError: gradients are needed, which it does not have.
        """
        if dispatched.layout not in self.layouts:
            expected = ", ".join(sorted(layout.name for layout in self.layouts))
            raise ShapeError(
                f"{self.name}: the record has the {dispatched.layout.name} layout, expected "
                f"{expected}; use runner='auto'"
            )
        if not self.has_gradients:
            self._check_record(dispatched, weights)
        if isinstance(dispatched, MaskedDispatchOutput):
            return dispatched.combine_input(self._compute_masked(dispatched, weights))
        return dispatched.combine_input(self._compute_rows(dispatched, weights))

    def _check_record(self, dispatched: DispatchOutput, weights: ExpertTensors) -> None:
        """Refuse what kernels without gradients would misread, and rows or experts that need them.

        Rows that passed with these experts before are not checked again.
        """
        rows = dispatched.hidden_states
        passed = self._passed.get(id(rows))
        if passed is None or passed[0]() is not rows or passed[1]() is not weights:
            self._check_rows(rows, weights, dispatched.layout)
            if len(self._passed) >= _MOST_PASSED:
                self._passed.clear()
            self._passed[id(rows)] = ref(rows), ref(weights)
        self._check_sizes(dispatched, weights)
        if torch.is_grad_enabled() and (rows.data.requires_grad or weights.requires_grad):
            what = "rows" if rows.data.requires_grad else "experts"
            raise ConfigError(
                f"{self.name}: {what} need gradients, which its kernels do not have "
                f"({dispatched.handle.where}); use torch.no_grad()"
            )

    @abstractmethod
    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> torch.Tensor:
        """Return the result of each slot, [C, H]."""

    def _compute_masked(
        self, dispatched: MaskedDispatchOutput, weights: ExpertTensors
    ) -> torch.Tensor:
        """Return the result of each row, [L, C, H], by default as L * C slots without an index."""
        shape = dispatched.hidden_states.data.shape
        return self._compute_rows(_as_rows(dispatched), weights).unflatten(0, shape[:2])


# Cached, because every run() asks.
@lru_cache
def row_major_readings(
    dtypes: frozenset[WireDtype], wanted: WireFormat | None
) -> tuple[RowReading, ...]:
    """Return the readings of formats of these dtypes: `wanted`, or else all known formats."""
    formats = []
    for dtype in sorted(dtypes):
        if not dtype.is_quantized:
            formats.append(WireFormat(dtype=dtype))
        elif wanted is not None and dtype is wanted.dtype:
            formats.append(wanted)
        else:
            formats += [known for known in KNOWN_FORMATS if known.dtype is dtype]
    return tuple(RowReading(format=each) for each in formats)


def _as_rows(masked: MaskedDispatchOutput) -> RowsDispatchOutput:
    """View a record of slabs [L, C, H] as L * C rows without an index: slot s is row s."""
    rows, counts, weights = masked.hidden_states, masked.num_tokens_per_expert, masked.slot_weights
    num_experts, capacity = rows.data.shape[:2]
    scales = None if rows.scales is None else rows.scales.flatten(0, 1)
    first = torch.arange(num_experts + 1, dtype=torch.int32, device=counts.device)
    return RowsDispatchOutput(
        hidden_states=replace(rows, data=rows.data.flatten(0, 1), scales=scales),
        index=SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_tokens_per_expert=counts,
            first_slot=first * capacity,
            host_num_tokens_per_expert=None,
        ),
        slot_weights=None if weights is None else weights.flatten(),
        weights_applied_by=masked.weights_applied_by,
        handle=masked.handle,
    )


def size_reasons(weights: ExpertTensors, *, multiple: int) -> list[str]:
    """Return why kernels refuse experts whose sizes are not multiples; empty if they are."""
    return [
        f"{name} is {size}, expected a multiple of {multiple}"
        for name, size in weights.sizes.items()
        if size % multiple
    ]


def int32_reasons(weights: ExpertTensors) -> list[str]:
    """Return why sums of products of INT8 codes may overflow int32; empty if they cannot."""
    return [
        f"{name} is {size}, expected at most {_MAX_SUMMANDS}, beyond which sums overflow int32"
        for name, size in weights.sizes.items()
        if size > _MAX_SUMMANDS
    ]


def slot_weights_to_apply(dispatched: DispatchOutput, caller: str) -> torch.Tensor | None:
    """Return router weights of slots, [C] or [L, C], if the runner applies them, else None.

    Raises:
        ShapeError: the runner applies weights, but the record has none, or not one for each slot.
    """
    if dispatched.weights_applied_by is not WeightsAppliedBy.RUNNER:
        return None
    found = dispatched.slot_weights
    is_masked = isinstance(dispatched, MaskedDispatchOutput)
    expected = dispatched.hidden_states.data.shape[:2] if is_masked else (dispatched.num_slots,)
    if found is None or found.shape != expected:
        came = "None" if found is None else list(found.shape)
        raise ShapeError(
            f"{caller}: slot_weights is {came}, expected {list(expected)}, because "
            f"weights_applied_by is {WeightsAppliedBy.RUNNER.value}; pass one weight per slot, "
            "or let combine apply them"
        )
    return found


def weight_slots(hidden: torch.Tensor, slot_weights: torch.Tensor) -> torch.Tensor:
    """Multiply hidden [S, *] by slot_weights [S], in sum_dtype(), and cast once."""
    return (hidden * slot_weights.unsqueeze(1)).to(hidden.dtype)
