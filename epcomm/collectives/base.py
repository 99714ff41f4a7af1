"""The contract of a transport: all-to-all of rows, all-gather of equal tensors, agreement."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from epcomm.errors import ConfigError

Scalar = str | int | float | bool | None


class Collectives(ABC):
    """Three verbs over the ranks of one group.

    Every verb is collective: all ranks call the same verbs in the same order. Ranks are numbered
    inside the group.
    """

    rank: int
    world_size: int
    device: torch.device

    @abstractmethod
    def all_to_all(
        self,
        send: Tensor,
        *,
        send_splits: Sequence[int] | None = None,
        recv_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """Send consecutive rows to each rank and return the rows from all ranks, by source.

        Args:
            send: [N, ...], contiguous, any dtype (bytes travel); N = sum(send_splits).
            send_splits: rows for each rank; None: N / W each.
            recv_splits: rows from each rank; None: N / W each.

        Returns:
            [sum(recv_splits), ...], ordered by source rank.

        Collective: yes; trailing shape and dtype equal on all ranks.
        Host sync: on gloo, until the rows are here; on NCCL none.
        Lifetime: the caller owns the result.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return [W, *tensor.shape]: the tensors of all ranks.

        Collective: yes; shape and dtype equal on all ranks.
        Host sync: as all_to_all.   Lifetime: the caller owns the result.
        """

    def gather_records(self, record: Mapping[str, Scalar]) -> list[dict[str, Scalar]]:
        """Return the small records of all ranks, by rank; JSON travels, never pickle.

        Collective: yes.   Host sync: yes.
        """
        payload = json.dumps(dict(record)).encode()
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        lengths = self.all_gather(length).flatten().tolist()
        padded = payload.ljust(max(lengths))
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)
        texts = self.all_gather(mine).cpu().numpy()
        return [json.loads(texts[rank].tobytes()) for rank in range(self.world_size)]

    def agree(self, record: Mapping[str, Scalar], *, what: str) -> None:
        """Compare a record over all ranks.

        Args:
            record: names and values that must be equal everywhere.
            what: the function and the thing compared, for the message.

        Collective: yes.   Host sync: yes.

        Raises:
            ConfigError: some field differs; on every rank, with the field, values and ranks.
        """
        records = self.gather_records(record)
        names = list(dict.fromkeys(name for other in records for name in other))
        faults = [
            _describe_values(name, [other.get(name, "<absent>") for other in records])
            for name in names
            if len({json.dumps(other.get(name, "<absent>")) for other in records}) > 1
        ]
        if faults:
            raise ConfigError(
                f"{what}: ranks disagree on {'; on '.join(faults)} "
                f"(this is rank {self.rank} of {self.world_size}); make them equal on all ranks"
            )


def _describe_values(name: str, values: Sequence[Scalar]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(json.dumps(value), []).append(rank)
    parts = [f"{value} on {describe_ranks(ranks)}" for value, ranks in ranks_of.items()]
    return f"{name}: {', '.join(parts)}"


def describe_ranks(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 0, 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
