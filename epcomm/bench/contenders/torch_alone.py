"""What torch alone offers, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.contenders.base import Contender, Experts
from epcomm.bench.contenders.expert_rows import ExpertRows

ALTERNATIVES: Mapping[str, Callable[[Experts], Contender]] = MappingProxyType(
    {ExpertRows.name: ExpertRows, AllGather.name: AllGather}
)
