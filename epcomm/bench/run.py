"""Find the contenders that serve here, check them, time them in turn, and report the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist

from epcomm.bench.advice import advise
from epcomm.bench.check import CheckError, check_contender
from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.contenders.backends import Epcomm, MissingContender, find_backends
from epcomm.bench.contenders.base import Contender, Experts
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.layer import measure_layers
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.options import BenchOptions, described
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.records import Report, Timing, Wrong
from epcomm.bench.turns import call_of, is_in_graph, time_all
from epcomm.group import EPGroup

# The contenders that are plain torch, by name.
ALTERNATIVES: Mapping[str, Callable[[Experts], Contender]] = MappingProxyType(
    {ExpertRows.name: ExpertRows, AllGather.name: AllGather}
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """The results of a run so far."""

    timings: list[Timing] = field(default_factory=list)
    layers: list[Timing] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    absent: dict[tuple[str, str], MissingContender] = field(default_factory=dict)


def run_bench(options: BenchOptions, on_round: Callable[[int], None]) -> Report:
    """Check and measure every contender at every T: the same report on all ranks.

    Args:
        options: of the run, equal on all ranks.
        on_round: called on every rank with T, after each timed round.

    Collective: yes, over the default process group.   Host sync: yes.
    Raises:
        ConfigError: the ranks cannot share the experts.
        EPTimeout: some rank did not arrive.
    """
    options.check_ranks(dist.get_world_size())
    found = _Found()
    device = torch.device("cpu")
    for tokens in options.tokens:
        # A group for each T: its buffers are closed before the next are opened.
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            device = group.device
            _measure(options, tokens, group, found, partial(on_round, tokens))
            if options.intermediate is not None:
                batch = options.make_batches(tokens, group.world_size, device)[group.rank]
                timings, wrong = measure_layers(options, group, batch)
                found.layers.extend(timings)
                found.wrong.extend(wrong)
    return Report(
        configuration={
            **described(options),
            "ranks": dist.get_world_size(),
            "device": device.type,
            "transport": str(dist.get_backend()),
        },
        hardware=describe_hardware(device),
        versions=describe_versions(device),
        command=options.command,
        results=found.timings,
        layers=found.layers,
        wrong=found.wrong,
        absent=list(found.absent.values()),
        advice=advise(found.timings),
    )


def _measure(
    options: BenchOptions,
    tokens: int,
    group: EPGroup,
    found: _Found,
    on_round: Callable[[], None],
) -> None:
    """Check and time all contenders at one T. Collective: yes."""
    batches = options.make_batches(tokens, group.world_size, group.device)
    num_local = options.experts // group.world_size
    right: list[Contender] = []
    for contender in _contenders(options, tokens, group, found):
        try:
            check_contender(contender, batches, group.rank, num_local)
        except CheckError as fault:
            found.wrong.append(Wrong(name=contender.name, tokens=tokens, fault=str(fault)))
        else:
            right.append(contender)
    batch = batches[group.rank]
    del batches
    sent = {
        each.name: max(of_all_ranks(each.sent_bytes(batch)), key=lambda rank: rank.total)
        for each in right
    }
    calls = {each.name: call_of(each, batch, group.rank * num_local) for each in right}
    us = time_all(calls, group.device, options, on_round=on_round)
    for contender in right:
        contender.check()
        found.timings.append(
            Timing(
                mode=contender.mode,
                backend=contender.backend,
                tokens=tokens,
                in_graph=is_in_graph(contender, group.device),
                us=us[contender.name],
                sent_bytes=sent[contender.name],
            )
        )


def _contenders(
    options: BenchOptions, tokens: int, group: EPGroup, found: _Found
) -> list[Contender]:
    """Open every contender. Collective: yes."""
    opened: list[Contender] = []
    spec = options.moe_spec()
    for mode in options.modes:
        serving, absent = find_backends(group, spec, options.config(mode, tokens), options.backends)
        found.absent.update({(each.mode.value, each.backend): each for each in absent})
        opened += [
            Epcomm(group, spec, options.config(mode, tokens, backend)) for backend in serving
        ]
    experts = Experts.of(group, options.experts)
    return [*opened, *(make(experts) for make in ALTERNATIVES.values())]
