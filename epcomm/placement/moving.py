"""Move experts between ranks, from one placement to another, all of them or none.

Rows of experts are sent in pieces and staged in host memory until every rank has all of its rows.
The device needs little more memory, and a failure before that point has written nothing. Then each
rank writes its rows in place, so parameters keep their addresses, in graphs too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from epcomm.collectives.base import Collectives
from epcomm.placement.expert_placement import ExpertPlacement

# Most bytes of one tensor that a rank sends, and that it receives, at a time; larger experts are
# sent one at a time. 64 MiB: enough for the full rate of any link, and little compared with the
# experts of a rank. The device needs twice this memory in addition to the experts.
PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The move of one expert: physical ids in the old placement and in the new one."""

    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class MoveMemory:
    """The most memory that a move takes on one rank, in addition to the experts of its layer.

    device_bytes: rows that are sent and received at a time, of the largest parameter.
    host_bytes: staged rows. Each state of an optimizer, such as a moment of Adam, adds as much as
        its parameters.
    """

    device_bytes: int
    host_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, num_physical: int, num_ranks: int) -> Self:
        """Compute the sizes for P = num_physical experts; tensors: some [N, ...], on meta too."""
        local = num_physical // num_ranks
        device_bytes = host_bytes = 0
        for tensor in tensors.values():
            row = tensor.numel() // tensor.shape[0] * tensor.element_size()
            most = max(1, PIECE_BYTES // max(1, row))
            rows = min(most, local) + min(most, num_physical - local)
            device_bytes = max(device_bytes, rows * row)
            host_bytes += local * row
        return cls(device_bytes=device_bytes, host_bytes=host_bytes)


def transfers_between(old: ExpertPlacement, new: ExpertPlacement) -> list[Transfer]:
    """Return the source of each physical expert that changes. Local; pure.

    The source is the rank itself if it holds the expert; else a rank on the same host, if one does;
    among several, the one that sends least so far.
    """
    found: list[Transfer] = []
    num_sent = [0] * old.num_ranks
    for target, (before, expert) in enumerate(
        zip(old.physical_to_logical, new.physical_to_logical, strict=True)
    ):
        if before == expert:
            continue
        rank, host = new.rank_of(target), new.host_of(target)

        def cost(copy: int, rank: int = rank, host: int = host) -> tuple[bool, bool, int, int]:
            holder = old.rank_of(copy)
            return holder != rank, new.host_of(copy) != host, num_sent[holder], copy

        source = min(old.replicas[expert], key=cost)
        if old.rank_of(source) != rank:
            num_sent[old.rank_of(source)] += 1
        found.append(Transfer(source=source, target=target))
    return found


@torch.no_grad()
def stage_experts(
    tensors: Mapping[str, Tensor],
    old: ExpertPlacement,
    new: ExpertPlacement,
    collectives: Collectives,
) -> Callable[[], None]:
    """Receive the rows that this rank's experts have in a new placement, without writing them.

    tensors: this rank's [L, ...] by name, contiguous, any dtype; alike on all ranks.

    Returns: a function that writes the rows in place; local.

    Collective: yes.   Host sync: yes.
    Raises:
        EPTimeout: some ranks did not arrive; nothing was written.
    """
    transfers = transfers_between(old, new)
    rank, size = collectives.rank, old.num_local_experts
    staged: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        rows = _as_rows(tensor)
        staged[name] = {
            each.target - rank * size: rows[each.source - rank * size].to("cpu", copy=True)
            for each in transfers
            if each.source // size == rank == each.target // size
        }
        most = max(1, PIECE_BYTES // max(1, rows.shape[1]))
        for piece in _pieces(transfers, size, collectives.world_size, most):
            staged[name] |= _exchange(rows, piece, size, collectives)

    @torch.no_grad()
    def write() -> None:
        for name, tensor in tensors.items():
            into = _as_rows(tensor)
            for place, row in staged[name].items():
                into[place].copy_(row)

    return write


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a view [L, bytes of an expert] of a contiguous [L, ...]."""
    return tensor.detach().view(tensor.shape[0], -1).view(torch.uint8)


def _pieces(
    transfers: Sequence[Transfer], size: int, world_size: int, most: int
) -> list[list[Transfer]]:
    """Divide the transfers so that no rank sends or receives more than `most` rows at a time."""
    pieces: list[list[Transfer]] = []
    # The number of rows that each rank has sent and received so far.
    num_sent, num_received = [0] * world_size, [0] * world_size
    for each in transfers:
        source, target = each.source // size, each.target // size
        if source == target:
            continue
        number = max(num_sent[source], num_received[target]) // most
        # A rank whose partner is busy leaves the rest of a piece empty.
        num_sent[source] = max(num_sent[source], number * most) + 1
        num_received[target] = max(num_received[target], number * most) + 1
        pieces += [[] for _ in range(number + 1 - len(pieces))]
        pieces[number].append(each)
    return pieces


def _exchange(
    rows: Tensor, piece: Sequence[Transfer], size: int, collectives: Collectives
) -> dict[int, Tensor]:
    """Exchange the rows of one piece; return received rows by local expert. Collective."""
    rank, ranks = collectives.rank, range(collectives.world_size)
    sent = [each for each in piece if each.source // size == rank]
    received = [each for each in piece if each.target // size == rank]
    # Both ends of a transfer have the order of the piece within their pair of ranks.
    sent.sort(key=lambda each: each.target // size)
    received.sort(key=lambda each: each.source // size)
    order = torch.tensor([e.source % size for e in sent], dtype=torch.int64, device=rows.device)
    came = collectives.all_to_all(
        rows.index_select(0, order),
        send_splits=[sum(e.target // size == other for e in sent) for other in ranks],
        recv_splits=[sum(e.source // size == other for e in received) for other in ranks],
        phase="rebalance",
    ).cpu()
    return {each.target % size: came[index] for index, each in enumerate(received)}
