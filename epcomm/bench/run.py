"""Find the contenders that serve here, check them, time them in turn, and report the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from epcomm.bench.bounds import measure_rates
from epcomm.bench.check import CheckError, check_contender
from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.base import Contender
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.layer import measure_layers
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.options import BenchOptions, described
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.records import Report, Timing, Wrong
from epcomm.bench.report import advise, as_json
from epcomm.bench.turns import call_of, is_in_graph, time_all
from epcomm.errors import BackendUnavailable, ConfigError
from epcomm.group import EPGroup
from epcomm.testing.data import RankBatch

# The contenders that are plain torch, by name, each made for a number of experts.
ALTERNATIVES: Mapping[str, Callable[[int], Contender]] = {
    ExpertRows.name: ExpertRows,
    AllGather.name: AllGather,
}


def run_bench(
    options: BenchOptions, on_round: Callable[[int], None], output: Path | None = None
) -> Report:
    """Check and measure every contender at every T: the same report on all ranks.

    Args:
        options: of the run, equal on all ranks.
        on_round: called on every rank with T, after each timed round.
        output: written on this rank after each T, so that a run that is ended keeps what it has.

    Collective: yes, over the default process group.   Host sync: yes.
    Raises:
        ConfigError: the ranks cannot share the experts.
        EPTimeout: some rank did not arrive.
    """
    options.check_ranks(dist.get_world_size())
    with EPGroup(dist.group.WORLD) as group:
        device = group.device
    is_of_layers = options.intermediate is not None
    report = Report(
        configuration={
            **described(options),
            "ranks": dist.get_world_size(),
            "device": device.type,
            "transport": str(dist.get_backend()),
        },
        hardware=describe_hardware(device),
        versions=describe_versions(device),
        command=options.command,
        rates=measure_rates(options, device) if is_of_layers else {},
    )
    measure = measure_layers if is_of_layers else _measure_pairs
    for tokens in options.tokens:
        # A group for each T: its buffers are closed before the next are opened.
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            batches = options.make_batches(tokens, group.world_size, device)
            measure(options, group, batches, report, partial(on_round, tokens))
        report = replace(report, advice=advise(report.results))
        if output is not None:
            output.write_text(as_json(report), encoding="utf-8")
    return report


def _measure_pairs(
    options: BenchOptions,
    group: EPGroup,
    batches: Sequence[RankBatch],
    report: Report,
    on_round: Callable[[], None],
) -> None:
    """Check and time all contenders at one T; batches: of all ranks. Collective: yes."""
    batch, tokens = batches[group.rank], len(batches[group.rank].x)
    first_expert = group.rank * (options.experts // group.world_size)
    opened: list[Contender] = []
    for mode, backend, sums in product(options.modes, options.backends, (None, *options.combine)):
        config = options.config(mode, tokens, backend, sums)
        try:
            opened.append(Epcomm(group, options.moe_spec(), config))
        except (BackendUnavailable, ConfigError) as error:
            report.add_absent(config, str(error))
    right: list[Contender] = []
    for contender in [*opened, *(make(options.experts) for make in ALTERNATIVES.values())]:
        try:
            check_contender(contender, batch, first_expert)
        except CheckError as fault:
            report.wrong.append(Wrong(name=contender.name, tokens=tokens, fault=str(fault)))
        else:
            right.append(contender)
    sent = {
        each.name: max(of_all_ranks(each.sent_bytes(batch)), key=lambda rank: rank.total_bytes)
        for each in right
    }
    calls = {each.name: call_of(each, batch, first_expert) for each in right}
    us = time_all(calls, group.device, options, on_round=on_round)
    for contender in right:
        contender.check()
        report.results.append(
            Timing(
                mode=contender.mode,
                backend=contender.backend,
                tokens=tokens,
                in_graph=is_in_graph(contender, group.device),
                us=us[contender.name],
                sent_bytes=sent[contender.name],
            )
        )
