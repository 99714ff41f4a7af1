"""Counts of a layer on one rank, and the load of each of its experts."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from epcomm.buffers.traffic import BufferTraffic
from epcomm.errors import ConfigError
from epcomm.group import EPGroup


@dataclass(frozen=True, kw_only=True)
class EPStats:
    """The counts of what one layer on one rank has done since construction; forward passes only.

    num_tokens: dispatched here.   num_rows: received.   num_slots: (token, expert) pairs computed.
    max_slots: most slots of one call.
    traffic: bytes sent by the buffer, by all layers that share it, backward included.
    expert_slots: [L], int64, on the device: (token, expert) pairs by expert of this rank, as they
        were when the statistics were taken, since the last rebalance; None in statistics of no
        layer. Not compared by `==`.
    rank_load: [W], float64, on the device: entries that this rank's tokens have for experts of each
        rank; None where EPConfig.record_load is not set. Not compared by `==`.

    Calls that backward repeats for activation checkpointing count nothing but traffic. In a device
    graph, expert_slots counts every replay; the numbers of the host count only the capture.
    """

    num_calls: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    num_slots: int = 0
    max_slots: int = 0
    traffic: BufferTraffic = field(default_factory=BufferTraffic)
    expert_slots: Tensor | None = field(default=None, repr=False, compare=False)
    rank_load: Tensor | None = field(default=None, repr=False, compare=False)

    @cached_property
    def num_tokens_per_expert(self) -> tuple[int, ...]:
        """The tokens that each expert of this rank has computed: L counts.

        Local.   Host sync: yes, when first read.
        """
        return () if self.expert_slots is None else tuple(self.expert_slots.tolist())

    @property
    def imbalance(self) -> float:
        """The most tokens of an expert of this rank over their mean; 1.0 before the first.

        Local.   Host sync: yes, when first read.
        """
        return imbalance_of(self.num_tokens_per_expert)

    @cached_property
    def rank_imbalance(self) -> float:
        """The largest of rank_load over their mean; 1.0 before the first, or without rank_load.

        Local, of the tokens of this rank alone.   Host sync: yes, when first read.
        """
        return 1.0 if self.rank_load is None else imbalance_of(tuple(self.rank_load.tolist()))


def imbalance_of(loads: tuple[int, ...] | tuple[float, ...]) -> float:
    """Return the largest of some loads over their mean, and 1.0 where there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


class LayerCounter:
    """Counts the forward passes of one layer on one rank."""

    def __init__(self, num_local_experts: int, device: torch.device) -> None:
        # Plain numbers: a new record in every call would take host time.
        self._num_calls = self._num_tokens = self._num_rows = 0
        self._num_slots = self._max_slots = 0
        # The counts are allocated here, not in the first call: a capture would set them to zero in
        # every replay.
        self._expert_slots = torch.zeros(num_local_experts, dtype=torch.int64, device=device)

    def count(
        self, num_tokens: int, num_rows: int, num_slots: int, num_tokens_per_expert: Tensor
    ) -> None:
        """Add a call. Local; no host sync; may be captured in a device graph.

        num_tokens: of this rank.   num_rows: received.
        num_slots: computed, where the host has the number, else those allocated.
        num_tokens_per_expert: [L], int32, on the device: the slots that this rank computed.
        """
        # Backward is running, so this call repeats one that was already counted.
        if torch._C._current_graph_task_id() != -1:
            return
        self._num_calls += 1
        self._num_tokens += num_tokens
        self._num_rows += num_rows
        self._num_slots += num_slots
        self._max_slots = max(self._max_slots, num_slots)
        self._expert_slots.add_(num_tokens_per_expert)

    def forget_experts(self) -> None:
        """Count by expert from zero again, because this rank has other experts. Local."""
        self._expert_slots.zero_()

    def snapshot(self, traffic: BufferTraffic) -> EPStats:
        """Return the counts so far; later calls do not change them. Local; no host sync."""
        return EPStats(
            num_calls=self._num_calls,
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            num_slots=self._num_slots,
            max_slots=self._max_slots,
            traffic=traffic,
            expert_slots=self._expert_slots.clone(),
        )


def gather_expert_slots(stats: EPStats, group: EPGroup) -> Tensor:
    """Return [W, L], int64, on the device: the counts by expert of every rank of the group.

    stats: of the same layer on every rank, whose group it is.

    Collective: yes, between the calls of layers, never within one.   Host sync: as all_gather().
    Raises:
        ConfigError: the statistics are not those of a layer.
    """
    if stats.expert_slots is None:
        raise ConfigError(
            f"gather_expert_slots: the statistics have no counts by expert ({group.where}); pass "
            "what stats() of a layer returned"
        )
    return group.collectives.all_gather(stats.expert_slots, phase="gather_expert_slots")
