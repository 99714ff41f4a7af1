"""The requirements of a layer on a backend, and the capabilities of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from epcomm.errors import ConfigError, shown
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
    """The sizes of one MoE layer, as far as they matter to communication; equal on all ranks.

    plan() checks it, so that with a group all ranks hear of a fault on one of them.

    hidden_size: H.   num_experts: P, physical experts of all ranks.   top_k: K.
    dtype: of the hidden states.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16

    def check(self) -> None:
        """Refuse a layer that cannot be. Local.

        Raises:
            ConfigError: a number is no integer from 1 to MAX_SIZE, or there is no such dtype on the
                wire.
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
    """The verdict on whether a backend can run on this rank: what it lacks, and what to do.

    command: the one that would bring all of it; empty where none is known or needed.
    needs: the hardware or system without which no command can; empty where that is here.
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
    ) -> Availability:
        """Make the verdict on what a machine lacks; ok if it lacks nothing.

        Args:
            missing: what is not installed.
            command: installs all of that.
            absent: hardware that is not there, which no command brings.
            needs: what to have instead, such as `NVIDIA GPUs`.
        """
        return cls(
            ok=not (missing or absent),
            reasons=(*missing, *absent),
            command=command if missing and not absent else "",
            needs=needs if absent else "",
        )

    def also(self, reasons: Sequence[str]) -> Availability:
        """Return this verdict with more reasons why not, if there are any."""
        return replace(self, ok=False, reasons=(*self.reasons, *reasons)) if reasons else self


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """The host of each rank of a group; equal on all ranks.

    The place of a rank is its number among the ranks of its host. Hosts are numbered in the order
    of their first ranks. Example: hosts 0 0 1 1 give the ranks the places 0 1 0 1.

    host_of_rank: [W], for each rank the number of its host.
    """

    host_of_rank: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[object]) -> HostLayout:
        """Give a number to each host: names[r] is equal for the ranks of one host alone."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(host_of_rank=tuple(numbers[name] for name in names))

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return len(self.host_of_rank)

    @cached_property
    def ranks_of_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, in ascending order."""
        hosts = range(max(self.host_of_rank) + 1)
        return tuple(
            tuple(rank for rank, other in enumerate(self.host_of_rank) if other == host)
            for host in hosts
        )

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.ranks_of_host)

    @property
    def is_even(self) -> bool:
        """Return whether all hosts have as many ranks."""
        return len({len(ranks) for ranks in self.ranks_of_host}) == 1

    def ranks_elsewhere(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of other hosts than that of `rank`, in ascending order."""
        own = self.host_of_rank[rank]
        return tuple(other for other, host in enumerate(self.host_of_rank) if host != own)

    def __str__(self) -> str:
        hosts = (" ".join(map(str, ranks)) for ranks in self.ranks_of_host)
        return f"{self.num_hosts} hosts of ranks {', '.join(hosts)}"


@dataclass(frozen=True, kw_only=True)
class BufferSpec:
    """The rows and sizes that a buffer must carry; equal on all ranks, compared once in prepare().

    hidden_size: H.   top_k: K.   num_local_experts: L.
    dispatch_format: rows of dispatch on the wire.
    hidden_format: unquantised rows on the wire: of combine, and of gradients in both directions.
    max_tokens_per_rank: M, or None for no limit.
    max_recv_slots: static budget of slots a rank receives, or None for exact sizes.
    expert_alignment: each expert's slots start at a multiple of this, in either layout.
    compares_calls: ranks compare their calls where that needs an exchange of its own.
    num_sms: SMs of a GPU that kernels of its own may take, None for the buffer's choice.
    batches_in_flight: dispatches that may wait for their combine, None for the buffer's choice.
    intermediate_size: I, for fused operators, which compute the experts; buffers do not, and have
        None, as has a plan that was made without experts.
    returns_slots: router weights come with combine, and not with dispatch. Combine returns one row
        per slot, which the source rank sums: more bytes than sums, see Buffer.combine_slots().
    scale_layout: how the scales of slabs are to lie, in the layout MASKED over NVLink. Other
        buffers leave them as they come; WireTensor.scale_layout tells.
    hosts: where the ranks run, if on several hosts and known; else None.
    """

    hidden_size: int
    top_k: int
    num_local_experts: int
    dispatch_format: WireFormat
    hidden_format: WireFormat
    max_tokens_per_rank: int | None = None
    max_recv_slots: int | None = None
    expert_alignment: int = 1
    compares_calls: bool = False
    num_sms: int | None = None
    batches_in_flight: int | None = None
    intermediate_size: int | None = None
    returns_slots: bool = False
    scale_layout: ScaleLayout = ROW_MAJOR
    hosts: HostLayout | None = None

    def ranks_elsewhere(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are known to be on other hosts than `rank`, in ascending order."""
        return () if self.hosts is None else self.hosts.ranks_elsewhere(rank)

    def as_record(self) -> dict[str, str | int | None]:
        """Return plain values for Collectives.agree()."""
        return {
            "hidden_size": self.hidden_size,
            "top_k": self.top_k,
            "num_local_experts": self.num_local_experts,
            "dispatch_format": f"{self.dispatch_format} {self.dispatch_format.scale_dtype}",
            "hidden_format": f"{self.hidden_format} {self.hidden_format.scale_dtype}",
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "max_recv_slots": self.max_recv_slots,
            "expert_alignment": self.expert_alignment,
            "compares_calls": self.compares_calls,
            "num_sms": self.num_sms,
            "batches_in_flight": self.batches_in_flight,
            "intermediate_size": self.intermediate_size,
            "returns_slots": self.returns_slots,
            "scale_layout": str(self.scale_layout),
            "hosts": None if self.hosts is None else str(self.hosts),
        }


@dataclass(frozen=True, kw_only=True)
class BufferCaps:
    """The capabilities of a buffer; every claim is proved by testing/buffer_suite.

    layout: what it hands to the experts.
    trainable: operations stand alone, cached_dispatch works, weights travel and slots come in
        order, so autograd may use it and the runner applies router weights; else combine does.
        Activation checkpointing joins the rows of one dispatch with the gradients of another.
    ordered: slots come in (expert, source rank, token) order, ranks as Backend.source_order() says.
    wire_dtypes: what dispatch carries.
    max_tokens_per_rank, max_top_k: limits of the mechanism, None for none.
    hidden_multiple: H must be a multiple of this.
    batches_in_flight: dispatches that may wait for their combine, unless gradients are on, where
        their rows are copied; if one more is dispatched, combining the oldest raises HandleError.
        None: any number, and rows are ordinary tensors.
    batches_on_request: BufferSpec.batches_in_flight may ask for another number, for more memory.
    has_receive_hook: dispatch_async leaves the receive step to wait().
    is_static: sizes are agreed beforehand (max_tokens_per_rank, max_recv_slots) and faults wait
        on the device for check(), so that the host never does.
    has_slot_budget: BufferSpec.max_recv_slots bounds its static sizes; else they suffice for all.
    reports_faults: every rank hears of a bad call, at once or in check(); else only with
        BufferSpec.compares_calls, and otherwise its own rank alone knows.
    int8_profiles: arithmetics in which its INT8 rows may be made: any, unless a package makes them.
    device_types: of groups that it serves, None for all.
    """

    layout: Layout
    trainable: bool
    ordered: bool
    wire_dtypes: frozenset[WireDtype]
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

    @property
    def host_syncs(self) -> int:
        """The times that a dispatch makes the host wait for the device."""
        return 0 if self.is_static else 1
