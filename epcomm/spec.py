"""Records of what a layer requires and of what a backend supports."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import torch

from epcomm.errors import ConfigError, grouped, shown
from epcomm.types import (
    MAX_SIZE,
    ROW_MAJOR,
    Int8Profile,
    Layout,
    ScaleLayout,
    WireDtype,
    WireFormat,
    is_size,
)


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The sizes of one MoE layer that matter to communication; equal on all ranks.

    plan() checks them; with a group, an error on one rank is reported on all ranks.

    hidden_size: H.   num_experts: P, the physical experts of all ranks.   top_k: K.
    dtype: the dtype of the hidden states.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    def check(self) -> None:
        """Check the sizes and the dtype. Local.

        Raises:
            ConfigError: a number is not an integer from 1 to MAX_SIZE, or the dtype has no
                WireDtype.
        """
        for name in ("hidden_size", "num_experts", "top_k"):
            value = getattr(self, name)
            if not is_size(value):
                raise ConfigError(
                    f"MoESpec: {name} is {shown(value)}, expected an int from 1 to {MAX_SIZE}"
                )
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"MoESpec: top_k is {self.top_k}, expected at most num_experts = {self.num_experts}"
            )
        WireDtype.from_torch(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The answer whether a backend can run on this rank, with the reasons and the remedy if not.

    command: the command that installs all that is missing; empty if none is known or needed.
    needs: the required hardware or system that is absent; empty if none is absent.
    """

    ok: bool
    reasons: tuple[str, ...] = ()
    command: str = ""
    needs: str = ""

    @classmethod
    def judge(
        cls,
        *,
        missing: Sequence[str] = (),
        command: str = "",
        absent: Sequence[str] = (),
        needs: str = "",
    ) -> Self:
        """Return the availability of a backend; ok if nothing is missing or absent.

        missing: reasons that an installation removes.   absent: those that none removes.
        command, needs: for what is missing and what is absent, `NVIDIA GPUs` for example.
        """
        return cls(
            ok=not (missing or absent),
            reasons=(*missing, *absent),
            command=command if missing and not absent else "",
            needs=needs if absent else "",
        )

    def also(self, reasons: Sequence[str]) -> Self:
        """Return this availability with more reasons against it; unchanged if there are none."""
        return replace(self, ok=False, reasons=(*self.reasons, *reasons)) if reasons else self


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """The host of each rank of a group; equal on all ranks.

    The local index of a rank is its index among the ranks of its host. Hosts are numbered in the
    order of their first ranks. Example: ranks on hosts 0 0 1 1 have the local indices 0 1 0 1.

    host_of_rank: [W], the number of the host of each rank.
    """

    host_of_rank: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[object]) -> Self:
        """Return the layout for the host names of the ranks; ranks of one host have equal names."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(host_of_rank=tuple(numbers[name] for name in names))

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return len(self.host_of_rank)

    @cached_property
    def ranks_of_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, in ascending order."""
        ranks = grouped((host, rank) for rank, host in enumerate(self.host_of_rank))
        return tuple(map(tuple, ranks.values()))

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_of_host)

    @property
    def is_even(self) -> bool:
        """Return whether all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.ranks_of_host}) == 1

    def ranks_elsewhere(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on other hosts than `rank`, in ascending order."""
        own = self.host_of_rank[rank]
        return tuple(other for other, host in enumerate(self.host_of_rank) if host != own)

    def __str__(self) -> str:
        hosts = (" ".join(map(str, ranks)) for ranks in self.ranks_of_host)
        return f"{self.num_hosts} hosts of ranks {', '.join(hosts)}"


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """The rows and sizes that a buffer must support; open_buffer() compares them on all ranks.

    hidden_size: H.   top_k: K.   num_local_experts: L.
    dispatch_format: the wire format of rows in dispatch.
    hidden_format: the wire format of unquantised rows.
    combine_format: the format to which combine quantises the sums of a rank, in the forward pass;
        None: hidden_format.
    backward_format: the format of gradients in both directions; None: hidden_format.
    max_tokens_per_rank: M, or None for no limit.
    max_recv_slots: static budget of slots that a rank receives, or None for exact sizes.
    expert_alignment: each expert's slots start at a multiple of this, in either layout.
    compares_calls: ranks compare their calls even if that needs an extra exchange.
    num_sms: most SMs that the buffer's kernels may use; None: the buffer chooses.
    batches_in_flight: dispatches that may wait for their combine; None: the buffer chooses.
    intermediate_size: I, for fused operators, which compute the experts; None for buffers and for
        plans without experts.
    returns_slots: router weights are passed to combine, not to dispatch. Combine returns one row
        per slot and the source rank sums them, see ReturnsSlots.combine_slots_async().
    sum_groups: G, see EPConfig.sum_groups; combine returns one row per (token, group) that a rank
        holds, and applies the router weights. None: one row per (token, rank).
    sums_at_source: with sum_groups, combine returns one row per slot without weights, and the
        source rank sums by group with the router weights that it dispatched, because experts of
        one group are on several ranks.
    scale_layout: the layout of the scales of slabs, in the layout MASKED over NVLink. Other buffers
        do not change it; see WireTensor.scale_layout.
    hosts: the hosts of the ranks; None if there is one host or the hosts are unknown.
    """

    hidden_size: int
    top_k: int
    num_local_experts: int
    dispatch_format: WireFormat
    hidden_format: WireFormat
    combine_format: WireFormat | None = None
    backward_format: WireFormat | None = None
    max_tokens_per_rank: int | None = None
    max_recv_slots: int | None = None
    expert_alignment: int = 1
    compares_calls: bool = False
    num_sms: int | None = None
    batches_in_flight: int | None = None
    intermediate_size: int | None = None
    returns_slots: bool = False
    sum_groups: int | None = None
    sums_at_source: bool = False
    scale_layout: ScaleLayout = ROW_MAJOR
    hosts: HostLayout | None = None

    def ranks_elsewhere(self, rank: int) -> tuple[int, ...]:
        """Return the ranks known to be on other hosts than `rank`, in ascending order."""
        return () if self.hosts is None else self.hosts.ranks_elsewhere(rank)

    def returned_columns(self, world_size: int) -> int:
        """Return the rows of H that combine returns for one (token, rank) at most."""
        if self.sums_at_source:
            return self.top_k
        return 1 if self.sum_groups is None else self.sum_groups // world_size

    def as_record(self) -> dict[str, str | int | None]:
        """Return plain values for Collectives.agree()."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v if v is None or isinstance(v, int) else str(v) for n, v in values.items()}


@dataclass(frozen=True, kw_only=True)
class BufferCaps:
    """The capabilities of a buffer; testing/buffer_suite checks each of them.

    layout: the layout of received tokens.
    trainable: autograd may use the buffer and the runner applies router weights; otherwise combine
        applies them. Needs cached_dispatch, weights in dispatch, ordered slots, and operations
        that do not depend on each other: activation checkpointing combines the rows of one
        dispatch with the gradients of another.
    ordered: slots are in (expert, source rank, token) order, ranks in Backend.source_order().
    wire_dtypes: the dtypes that dispatch can send.
    combine_dtypes: the dtypes to which combine can quantise sums.
    backward_dtypes: the dtypes to which it can quantise gradients, if it is trainable.
    max_tokens_per_rank, max_top_k: limits of the backend; None for no limit.
    hidden_multiple: H must be a multiple of this.
    batches_in_flight: dispatches without gradients that may wait for their combine; if one more is
        dispatched, combining the oldest raises HandleError. With gradients, rows are copied and
        there is no limit. None: no limit, and rows are ordinary tensors.
    batches_on_request: BufferSpec.batches_in_flight can set another number, with more memory.
    has_receive_hook: dispatch_async leaves the receive step to wait().
    is_static: sizes are fixed at construction (max_tokens_per_rank, max_recv_slots) and faults
        stay on the device until check(), so the host never waits.
    has_slot_budget: BufferSpec.max_recv_slots limits the static sizes; otherwise they suffice for
        any routing.
    reports_faults: a bad call raises on every rank, immediately or in check(); otherwise it does so
        only with BufferSpec.compares_calls, and without it only on its own rank.
    int8_profiles: the INT8 arithmetics of its rows: all, unless a vendor package quantises them.
    device_types: the device types of groups that it serves; None for all.
    num_exchanges: the exchanges of a dispatch, each with a host sync unless is_static.
    """

    layout: Layout
    trainable: bool
    ordered: bool
    wire_dtypes: frozenset[WireDtype]
    combine_dtypes: frozenset[WireDtype] = frozenset()
    backward_dtypes: frozenset[WireDtype] = frozenset()
    max_tokens_per_rank: int | None = None
    max_top_k: int | None = None
    hidden_multiple: int = 1
    batches_in_flight: int | None = None
    batches_on_request: bool = False
    has_receive_hook: bool = False
    is_static: bool = False
    has_slot_budget: bool = True
    reports_faults: bool = True
    int8_profiles: frozenset[Int8Profile] = frozenset(Int8Profile)
    device_types: frozenset[str] | None = None
    num_exchanges: int = 1

    @property
    def host_syncs(self) -> int:
        """The number of host syncs of a dispatch."""
        return 0 if self.is_static else self.num_exchanges
