"""The bytes of a plan by link, between hosts and inside them, in `epcomm plan --hosts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.table import Table

from epcomm.errors import ConfigError
from epcomm.planning.links import ExchangeCost, GroupLimit, exchange_costs
from epcomm.planning.plans import PhasePlan

_BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The links and the routing that the user tells of; None for what nobody has said.

    gb_per_s_between, gb_per_s_inside: 10**9 bytes a second that a rank sends to ranks of other
        hosts, and of its own.
    limit: groups of experts that a token may use; None where redundant experts break them up.
    num_tokens: T of each rank, to tell the time of.
    """

    gb_per_s_between: float | None = None
    gb_per_s_inside: float | None = None
    limit: GroupLimit | None = None
    num_tokens: int | None = None

    def check(self, num_hosts: int | None, num_ranks: int) -> None:
        """Refuse the speed of one link alone, links that send nothing, and hosts of unlike sizes.

        Raises:
            ConfigError: one of these.
        """
        between, inside = self.gb_per_s_between, self.gb_per_s_inside
        if (between is None) != (inside is None):
            raise ConfigError(
                "epcomm plan: one of --gb-per-s-between and --gb-per-s-inside is missing, expected "
                "both or none; pass the other"
            )
        if any(speed is not None and not 0 < speed < float("inf") for speed in (between, inside)):
            raise ConfigError(
                f"epcomm plan: --gb-per-s-between is {between} and --gb-per-s-inside {inside}, "
                "expected numbers above 0; correct them"
            )
        if num_hosts is not None and num_ranks % num_hosts:
            raise ConfigError(
                f"epcomm plan: --ranks is {num_ranks}, expected a multiple of --hosts {num_hosts}; "
                "correct one of them"
            )


def links_json(phase: PhasePlan, options: LinkOptions) -> dict[str, object] | None:
    """Return the bytes by exchange and link, and the times; None where ranks are on one host."""
    costs, times = _costs_of(phase, options), _times_of(phase, options)
    if not costs:
        return None
    return {
        "hosts": str(phase.buffer_spec.hosts),
        "bytes_per_token": {
            name: {"most": asdict(cost.most), "expected": asdict(cost.expected)}
            for name, cost in costs.items()
        },
        "microseconds": dict(times) or None,
        "fastest": _fastest(times),
        "notes": _notes_of(phase, options),
    }


def links_table(title: str, phase: PhasePlan, options: LinkOptions) -> Table | None:
    """Tabulate the bytes of a token by exchange and link; None where ranks are on one host."""
    costs, times = _costs_of(phase, options), _times_of(phase, options)
    if not costs:
        return None
    caption = ".\n".join(_notes_of(phase, options))
    table = Table("dispatch and combine" + (title and f", {title}"), *costs, caption=caption)
    for what in ("most", "expected"):
        links = [asdict(getattr(cost, what)) for cost in costs.values()]
        for link in ("between", "inside"):
            label = f"bytes a token {link} hosts, {'at ' * (what == 'most')}{what}"
            table.add_row(label, *(f"{each[link]:,.0f} B" for each in links))
    if times:
        cells = (f"{us:,.1f} us{', wins' * (n == _fastest(times))}" for n, us in times.items())
        table.add_row(f"time of {options.num_tokens} tokens a rank", *cells)
    return table


def _costs_of(phase: PhasePlan, options: LinkOptions) -> Mapping[str, ExchangeCost]:
    if phase.buffer_spec.hosts is None:
        return {}
    return exchange_costs(phase, options.limit or GroupLimit())


def _times_of(phase: PhasePlan, options: LinkOptions) -> Mapping[str, float]:
    """Return the microseconds of each exchange; none where a number is missing."""
    num_tokens = options.num_tokens
    between, inside = options.gb_per_s_between, options.gb_per_s_inside
    if num_tokens is None or between is None or inside is None:
        return {}
    speeds = between * _BYTES_PER_GB, inside * _BYTES_PER_GB
    return {
        name: 1e6 * cost.seconds(num_tokens, *speeds)
        for name, cost in _costs_of(phase, options).items()
    }


def _fastest(times: Mapping[str, float]) -> str | None:
    return min(times, key=times.__getitem__) if times else None


def _notes_of(phase: PhasePlan, options: LinkOptions) -> list[str]:
    """Say on what the numbers rest, a sentence each."""
    limit, most = options.limit, phase.buffer_spec.max_tokens_per_rank
    if phase.caps.is_static:
        notes = [f"static sizes send M = {most} rows to every rank, used or not"]
    elif limit is None:
        notes = ["expected: experts drawn at random; redundant experts break up groups"]
    elif limit.topk_groups < limit.num_groups:
        used = f"{limit.topk_groups} of {limit.num_groups} groups"
        notes = [f"a token uses experts of {used}; expected: both drawn at random"]
    else:
        notes = ["expected: experts drawn at random"]
    if _times_of(phase, options):
        notes.append("time: expected bytes by the speed of links, at once flat, else in turn")
    elif options.gb_per_s_between is not None:
        notes.append("no time, because the number of tokens is unknown; pass --max-tokens")
    return notes
