"""Find what serves here, check it, time it in turn, and say what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from epcomm.bench.advice import advise
from epcomm.bench.check import CheckError, check_contender
from epcomm.bench.contenders.backends import Epcomm, MissingContender, find_backends
from epcomm.bench.contenders.base import Contender, Experts, SentBytes
from epcomm.bench.contenders.torch_alone import ALTERNATIVES
from epcomm.bench.layer import measure_layers
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.options import BenchOptions
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.records import Report, Timing, Wrong
from epcomm.bench.turns import call_of, is_in_graph, percentiles_of, take_turns
from epcomm.group import EPGroup
from epcomm.testing.data import RankBatch

# Called with the current step, the rounds that are done, and all rounds.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """The results of a run so far."""

    timings: list[Timing] = field(default_factory=list)
    layers: list[Timing] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    absent: dict[tuple[str, str], MissingContender] = field(default_factory=dict)


def run_bench(options: BenchOptions, on_progress: OnProgress) -> Report:
    """Check and measure every contender at every T: the same report on all ranks.

    Args:
        options: of the run, equal on all ranks.
        on_progress: called on every rank, after each round.

    Collective: yes, over the default process group.   Host sync: yes.
    Raises:
        ConfigError: the ranks cannot share the experts.
        EPTimeout: some rank did not come.
    """
    options.check_ranks(dist.get_world_size())
    found = _Found()
    device = torch.device("cpu")
    for place, tokens in enumerate(options.tokens):
        # A group for each T: its buffers are closed before the next are opened.
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            device = group.device
            progress = partial(_progress, on_progress, options, place)
            _measure(options, tokens, group, found, progress)
            if options.intermediate is not None:
                timings, wrong = measure_layers(options, group, _batch(options, tokens, group))
                found.layers.extend(timings)
                found.wrong.extend(wrong)
    return Report(
        configuration={
            **_described(options),
            "ranks": dist.get_world_size(),
            "device": device.type,
            "transport": str(dist.get_backend()),
        },
        hardware=describe_hardware(device),
        versions=describe_versions(device),
        command=options.command,
        timings=found.timings,
        layers=found.layers,
        wrong=found.wrong,
        absent=list(found.absent.values()),
        advice=advise(found.timings),
    )


def _progress(on_progress: OnProgress, options: BenchOptions, place: int, done: int) -> None:
    rounds = options.warm_up + options.iterations
    text = f"T = {options.tokens[place]}"
    on_progress(text, place * rounds + done, len(options.tokens) * rounds)


def _described(options: BenchOptions) -> dict[str, str | int]:
    values = asdict(options)
    del values["command"]
    listed = (list, tuple)
    return {
        name: ",".join(map(str, value)) if isinstance(value, listed) else value
        for name, value in values.items()
        if value is not None
    }


def _measure(
    options: BenchOptions,
    tokens: int,
    group: EPGroup,
    found: _Found,
    progress: Callable[[int], None],
) -> None:
    """Check and time all contenders at one T. Collective: yes."""
    batches = options.make_batches(tokens, group.world_size, group.device)
    num_local = options.experts // group.world_size
    right: list[tuple[str, Contender]] = []
    for mode, contender in _contenders(options, tokens, group, found):
        try:
            check_contender(contender, batches, group.rank, num_local)
        except CheckError as fault:
            found.wrong.append(Wrong(name=contender.name, tokens=tokens, fault=str(fault)))
        else:
            right.append((mode, contender))
    batch = batches[group.rank]
    del batches
    sent = {each.name: _most(each.sent_bytes(batch)) for _, each in right}
    calls = {each.name: call_of(each, batch, group.rank * num_local) for _, each in right}
    take_turns(calls, group.device, num_rounds=options.warm_up)
    done = iter(range(options.warm_up + 1, options.warm_up + options.iterations + 1))
    spans = take_turns(
        calls,
        group.device,
        num_rounds=options.iterations,
        on_round=lambda: progress(next(done)),
    )
    for mode, contender in right:
        if isinstance(contender, Epcomm):
            contender.check()
        found.timings.append(
            Timing(
                mode=mode,
                backend=contender.plan.backend if isinstance(contender, Epcomm) else contender.name,
                tokens=tokens,
                in_graph=is_in_graph(contender, group.device),
                us=percentiles_of(spans[contender.name]),
                sent_bytes=sent[contender.name],
            )
        )


def _batch(options: BenchOptions, tokens: int, group: EPGroup) -> RankBatch:
    return options.make_batches(tokens, group.world_size, group.device)[group.rank]


def _contenders(
    options: BenchOptions, tokens: int, group: EPGroup, found: _Found
) -> list[tuple[str, Contender]]:
    """Open every contender with its mode, which is empty for torch alone. Collective: yes."""
    opened: list[tuple[str, Contender]] = []
    spec = options.moe_spec()
    for mode in options.modes:
        serving, absent = find_backends(group, spec, options.config(mode, tokens), options.backends)
        found.absent.update({(each.mode.value, each.backend): each for each in absent})
        for backend in serving:
            config = options.config(mode, tokens, backend)
            name = f"{mode.value} {backend}"
            opened.append((mode.value, Epcomm(group, spec, config, name=name)))
    experts = Experts(
        rank=group.rank,
        world_size=group.world_size,
        num_local=options.experts // group.world_size,
    )
    return [*opened, *(("", make(experts)) for make in ALTERNATIVES.values())]


def _most(sent: SentBytes) -> SentBytes:
    """Return the bytes of the rank that sends most. Collective: yes."""
    return max(of_all_ranks(sent), key=lambda each: each.total)
