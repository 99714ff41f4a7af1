"""Measure how much of its exchange a layer exposes, and trace a call of it on all ranks.

A layer that waits for every transfer exposes the whole exchange; one that computes meanwhile
exposes less.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

from torch.profiler import profile, record_function

from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Percentiles
from epcomm.bench.turns import wait_for_all
from epcomm.calls.transfers import ThreadTransfers
from epcomm.group import EPGroup
from epcomm.records import Pending, Steps

T = TypeVar("T")
# A trace event of Chrome: its process is a rank; its thread the caller, transfers, or a stream.
Event = Mapping[str, Any]

# The calls of a layer: parts one after another, and with what can be computed meanwhile.
IN_TURN, OVERLAPPED = "in turn", "overlapped"
SHARED = "shared_experts"
_PREFIX = "epcomm::"
# The categories of events on a device.
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """The exchange that calls of a layer with a shared expert expose.

    us: medians on the slowest rank: of dispatch, products, combine and shared_experts alone, and of
        the calls.
    share: by call, (call - products - shared_experts) / (dispatch + combine).
    """

    name: str
    us: Mapping[str, float]
    share: Mapping[str, float]

    @classmethod
    def of(cls, name: str, spans: Mapping[str, Percentiles]) -> Exposure:
        """Return the exposure of a layer from the times of its parts and calls."""
        us = {part: round(times.p50, 2) for part, times in spans.items()}
        exchange, computation = us["dispatch"] + us["combine"], us["products"] + us[SHARED]
        calls = [call for call in (IN_TURN, OVERLAPPED) if call in us]
        share = {call: round((us[call] - computation) / exchange, 3) for call in calls}
        return cls(name=name, us=us, share=share)

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.2f} {call}" for call, share in self.share.items())
        exchange = f"{self.us['dispatch'] + self.us['combine']:.0f} us"
        return f"exposed share of an exchange of {exchange}, {self.name}: {shares}"


def trace(calls: Mapping[str, Callable[[], object]], group: EPGroup) -> list[Event]:
    """Make each call, all ranks together, and return what every rank did, in us since the epoch.

    Collective: as the calls.   Host sync: yes.
    """
    events: list[Event] = []

    def add(name: str, track: str, start_us: float, us: float) -> None:
        who = {"ph": "X", "pid": f"rank {group.rank}", "tid": track, "name": name}
        events.append({**who, "ts": start_us, "dur": us})

    def begin(make: Callable[[], Steps[T]], name: str, **options: bool) -> Pending[T]:
        """Begin a call that adds its event: the profiler records only the caller's thread."""

        def recorded() -> Steps[T]:
            start_us = time.time_ns() / 1e3
            try:
                return (yield from make())
            finally:
                add(name, "transfers", start_us, time.time_ns() / 1e3 - start_us)

        return begin_call(recorded, name, **options)

    with ExitStack() as stack:
        transfers = group.calls.transfers
        if isinstance(transfers, ThreadTransfers):
            begin_call = transfers.begin
            stack.enter_context(patch.object(transfers, "begin", begin))
        profiler = stack.enter_context(profile(acc_events=True))
        for name, call in calls.items():
            wait_for_all(group.device)
            with record_function(f"{_PREFIX}{name}"):
                call()
        wait_for_all(group.device)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = json.loads(path.read_text("utf-8"))
    for event in found["traceEvents"]:
        kind, name = event.get("cat"), event["name"]
        is_range = kind == "user_annotation" and name.startswith(_PREFIX)
        if is_range or kind in _DEVICE:
            track = "caller" if is_range else f"stream {event['tid']}"
            start_us = found["baseTimeNanoseconds"] / 1e3 + event["ts"]
            add(name.removeprefix(_PREFIX), track, start_us, event["dur"])
    return list(chain.from_iterable(of_all_ranks(events)))


def as_json(events: Sequence[Event]) -> str:
    """Return a trace that starts at time 0, in the JSON format that ui.perfetto.dev reads.

    Processes and threads are numbers there, each used once, which metadata events name.
    """
    first_us = min((event["ts"] for event in events), default=0.0)
    numbers: dict[tuple[str, ...], int] = {}
    shown: list[Event] = []
    for event in events:
        names = event["pid"], event["tid"]
        pid, tid = (numbers.setdefault(key, len(numbers) + 1) for key in (names[:1], names))
        shown.append({**event, "pid": pid, "tid": tid, "ts": round(event["ts"] - first_us, 3)})
    for key, number in numbers.items():
        kind = "process_name" if len(key) == 1 else "thread_name"
        who = {"pid": numbers[key[:1]], "tid": number}
        shown.append({"ph": "M", **who, "name": kind, "args": {"name": key[-1]}})
    return json.dumps({"traceEvents": shown}) + "\n"
