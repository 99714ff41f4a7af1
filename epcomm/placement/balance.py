"""Compute a placement from a load: replicate the most loaded experts, and pack the ranks evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from epcomm.errors import ConfigError, shown
from epcomm.placement.expert_placement import ExpertPlacement, check_sizes
from epcomm.placement.recorder import loads_of_ranks
from epcomm.types import is_size

if TYPE_CHECKING:
    # `import epcomm` loads no module that torch has not loaded.
    import numpy.typing as npt

# Largest load of a rank, relative to the mean, at which the search for a better placement stops.
_GOOD_ENOUGH = 1.001
# The search changes the number of copies of this many experts of the highest rank,
_MOST_CHANGED = 3
# each by these numbers.
_CHANGES = (-1, 1, -2, 2, -3, 3)
# Improvements after which the search stops.
_MOST_TRIALS = 16

# The loads of the items that are packed together.
_Loads: TypeAlias = "npt.NDArray[np.float64]"
# Experts, or the number of copies of each.
_Ints: TypeAlias = "npt.NDArray[np.int64]"


def balance(
    load: Tensor | Sequence[float],
    *,
    num_ranks: int,
    num_physical_experts: int,
    num_hosts: int = 1,
    num_groups: int = 1,
) -> ExpertPlacement:
    """Place experts so that the load of the most loaded rank is as small as the search finds.

    Copies of an expert share its load equally, as round robin does. Equal loads give equal
    placements on every machine.

    Args:
        load: [E], tokens of each logical expert, any unit; at least 0.
        num_ranks: W.
        num_physical_experts: P, a multiple of W; P - E of them are redundant.
        num_hosts: hosts of the ranks.
        num_groups: groups of experts, where routing is limited to groups. If hosts divide them, all
            experts of a group and their copies are placed on one host, so that a token limited to
            some groups is sent to as few hosts; unless there are more copies than the ranks of a
            host can hold, one each.

    Local.   Host sync: where load is on a device.   Deterministic: yes.
    Raises:
        ConfigError: a load that is NaN, infinite or negative; or sizes that do not fit.
    Source: the problem is that of DeepSeek's EPLB; ours: a rank holds an expert at most once, and
        exchanges improve a packing.
    """
    values = _checked(load)
    check_sizes(
        "balance",
        num_experts=len(values),
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        num_physical_experts=num_physical_experts,
    )
    if not is_size(num_groups) or len(values) % num_groups:
        raise ConfigError(
            f"balance: num_groups is {num_groups}, expected a divisor of the {len(values)} "
            "experts; pass num_groups of the routing"
        )
    has_room = num_physical_experts <= len(values) * (num_ranks // num_hosts)
    num_areas = num_hosts if num_groups > 1 and num_groups % num_hosts == 0 and has_room else 1
    found: list[ExpertPlacement] = []
    # Hosts of more even loads do not always have more even ranks.
    for exchanges in (True, False) if num_areas > 1 else (True,):
        placed: list[int] = []
        for experts in _areas(values, num_groups, num_areas, exchanges=exchanges):
            placed += _place(
                values[experts], experts, num_ranks // num_areas, num_physical_experts // num_areas
            )
        found.append(
            ExpertPlacement(
                num_experts=len(values),
                num_ranks=num_ranks,
                num_hosts=num_hosts,
                physical_to_logical=tuple(placed),
            )
        )
    return min(found, key=lambda placement: highest_load(placement, values))


def highest_load(placement: ExpertPlacement, load: Sequence[float] | _Loads) -> float:
    """Return the load of the most loaded rank, where copies of an expert serve equal parts."""
    owners = torch.tensor(placement.physical_to_logical, device="cpu")
    values, num_ranks = torch.tensor(load, device="cpu"), placement.num_ranks
    return float(loads_of_ranks(values, num_ranks=num_ranks, physical_to_logical=owners).max())


def _checked(load: Tensor | Sequence[float] | _Loads) -> _Loads:
    values = load.detach().double().cpu().numpy() if isinstance(load, Tensor) else load
    try:
        values = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(
            f"balance: load is {shown(load)}, expected [E], one number per expert; pass counts of "
            "tokens"
        ) from None
    if values.ndim != 1 or not len(values):
        raise ConfigError(
            f"balance: load is {list(values.shape)}, expected [E], one number per expert; make a "
            "placement for each layer"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise ConfigError(
            f"balance: the load of expert {wrong[0]} is {values[wrong[0]]}, expected a finite "
            "number of at least 0; record the load again"
        )
    return values


def _areas(values: _Loads, num_groups: int, num_areas: int, *, exchanges: bool) -> list[_Ints]:
    """Divide the experts into areas, which are hosts or all ranks; groups stay whole."""
    group_size = len(values) // num_groups
    ids = np.arange(len(values)).reshape(num_groups, group_size)
    loads = values.reshape(num_groups, group_size).sum(1)
    packed = _pack(loads, np.arange(num_groups), num_areas, exchanges=exchanges)
    return [ids[sorted(groups)].reshape(-1) for groups in packed]


def _place(values: _Loads, experts: _Ints, num_ranks: int, num_places: int) -> list[int]:
    """Return the logical expert of each physical one, for num_ranks ranks in their order."""
    one = np.ones(len(values), dtype=np.int64)
    best = _packed(values, _count_copies(values, num_places, num_ranks * one, one), num_ranks)
    # Fewer copies of one expert and more of another may pack better.
    for _ in range(_MOST_TRIALS):
        if best.highest <= _GOOD_ENOUGH * values.sum() / num_ranks:
            break
        trials = (_packed(values, other, num_ranks) for other in _other_copies(values, best))
        better = next((each for each in trials if each.highest < best.highest), None)
        if better is None:
            break
        best = better
    return [int(expert) for held in best.held for expert in sorted(experts[held])]


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """Experts on ranks: the number of copies of each, and the experts that each rank holds."""

    copies: _Ints
    held: list[_Ints]
    totals: list[float]
    highest: float


def _packed(values: _Loads, copies: _Ints, num_ranks: int) -> _Packing:
    owners = np.repeat(np.arange(len(values)), copies)
    held = [owners[items] for items in _pack((values / copies)[owners], owners, num_ranks)]
    totals = [float((values / copies)[each].sum()) for each in held]
    return _Packing(copies=copies, held=held, totals=totals, highest=max(totals))


def _other_copies(values: _Loads, packed: _Packing) -> Iterator[_Ints]:
    """Yield numbers of copies with more or fewer of the largest experts of the highest rank."""
    copies, num_ranks = packed.copies, len(packed.held)
    experts = packed.held[int(np.argmax(packed.totals))]
    largest = experts[np.lexsort((experts, -(values / copies)[experts]))][:_MOST_CHANGED]
    for expert in largest.tolist():
        most, least = np.full(len(values), num_ranks), np.ones_like(copies)
        for change in _CHANGES:
            wanted = int(copies[expert]) + change
            if 1 <= wanted <= num_ranks and copies.sum() - wanted >= len(values) - 1:
                most[expert] = least[expert] = wanted
                changed = _count_copies(values, int(copies.sum()), most, least)
                if changed.sum() == copies.sum():
                    yield changed


def _count_copies(values: _Loads, num_places: int, most: _Ints, least: _Ints) -> _Ints:
    """Assign each expert its least number of copies, and the others by the highest load of a copy.

    most: largest number of copies of each expert.
    """
    copies = least.copy()
    while copies.sum() < num_places and (copies < most).any():
        loads = np.where(copies < most, values / copies, -1.0)
        # Equal loads, such as zeros: the expert with the fewest copies.
        copies[np.lexsort((np.arange(len(values)), copies, -loads))[0]] += 1
    return copies


@dataclass(frozen=True, kw_only=True)
class _Bins:
    """Items in bins of one size; owners of the items in a bin are distinct."""

    loads: _Loads
    owners: _Ints
    items: list[list[int]]
    size: int

    def holds(self, place: int, owner: int) -> bool:
        return any(self.owners[item] == owner for item in self.items[place])

    def totals(self) -> list[float]:
        return [math.fsum(self.loads[items].tolist()) for items in self.items]


def _pack(loads: _Loads, owners: _Ints, number: int, *, exchanges: bool = True) -> list[list[int]]:
    """Pack items into bins of equal number, and exchange items while that lowers the highest."""
    items: list[list[int]] = [[] for _ in range(number)]
    bins = _Bins(loads=loads, owners=owners, items=items, size=len(loads) // number)
    totals = bins.totals()
    for item in np.lexsort((np.arange(len(loads)), -loads)).tolist():
        if _insert(bins, item, totals):
            totals = bins.totals()
    while exchanges and _exchange(bins):
        pass
    return bins.items


def _insert(bins: _Bins, item: int, totals: list[float]) -> bool:
    """Put an item into the lightest bin that has room and no item of the same owner.

    totals: the load of each bin, to which the item is added.   Returns: whether others moved too.
    """
    owner = int(bins.owners[item])
    places = sorted(range(len(bins.items)), key=lambda place: (totals[place], place))
    is_open = [place for place in places if len(bins.items[place]) < bins.size]
    for place in is_open:
        if not bins.holds(place, owner):
            bins.items[place].append(item)
            totals[place] += float(bins.loads[item])
            return False
    # Every open bin has an item of this owner. A full bin without one has more items than an open
    # bin has others, so one of its items can move to an open bin.
    for full in (place for place in places if not bins.holds(place, owner)):
        for place in is_open:
            moved = [i for i in bins.items[full] if not bins.holds(place, int(bins.owners[i]))]
            if moved:
                bins.items[full].remove(moved[-1])
                bins.items[place].append(moved[-1])
                bins.items[full].append(item)
                return True
    raise AssertionError("an owner has at most one item for each bin")


def _exchange(bins: _Bins) -> bool:
    """Exchange an item of the bin of highest load for one of another; False if nothing helps.

    The higher load of the two falls each time, so the loop ends.
    """
    totals = np.array(bins.totals())
    highest = int(totals.argmax())
    best: tuple[float, int, int, int] | None = None
    for place in np.argsort(totals, kind="stable").tolist():
        gap = totals[highest] - totals[place]
        # Exchanges that only move rounding errors would never end.
        if place == highest or gap <= 1e-12 * totals[highest]:
            continue
        mine, others = bins.items[highest], bins.items[place]
        fall = bins.loads[mine][:, None] - bins.loads[others][None, :]
        # The amount by which the larger load of the two decreases.
        gain = np.minimum(fall, gap - fall)
        for i, j in zip(*np.unravel_index(np.argsort(-gain, axis=None), gain.shape), strict=True):
            found = float(gain[i, j])
            if found <= 1e-12 * totals[highest] or (best is not None and found <= best[0]):
                break
            one, other = int(bins.owners[mine[i]]), int(bins.owners[others[j]])
            if one == other or not (bins.holds(place, one) or bins.holds(highest, other)):
                best = (found, place, int(i), int(j))
                break
    if best is None:
        return False
    _, place, i, j = best
    mine, others = bins.items[highest], bins.items[place]
    mine[i], others[j] = others[j], mine[i]
    return True
