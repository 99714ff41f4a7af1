"""Bounded waits: a deadline for every exchange, and an error that names the missing ranks.

A rank that cannot continue posts a report on a failure board, a channel that works when the
transport does not, and reads the reports of the others; a rank that posts no report within a grace
period is missing. A waiting rank reads the board every SLICE_S, so when one rank gives up, all
ranks do. An exchange that ends within the first SLICE_S never reads the board.

    rank 0 waits ......... deadline: posts, grace ... reads 0, 1, 3: "rank 2 did not arrive"
    rank 1 waits ......... sees the report of rank 0, posts ... the same
    rank 2 is busy .......................................... arrives, reads "0, 1, 3 gave up on 2"
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from epcomm.config import EPConfig
from epcomm.errors import EPError, EPTimeout, describe_ranks

# A step waits at most the given seconds (> 0) and returns whether the exchange is complete. It
# raises RuntimeError if the transport broke. It is called until it returns True.
Step = Callable[[float], bool]

# Seconds that a collective waits for other ranks until a layer sets another timeout.
DEFAULT_TIMEOUT_S = EPConfig.timeout_s
# Seconds between two reads of the failure board while an exchange waits.
SLICE_S = 0.25
# Seconds that the others have to report once a rank gives up: four slices.
GRACE_S = 1.0
# Seconds between two reads of the failure board while reports are collected.
POLL_S = 0.05
# Seconds that one call of a failure board may take.
LOOK_LIMIT_S = 0.5


class FailureBoard(ABC):
    """One short text per rank, readable by all ranks while a rank is lost.

    post() and read() return within LOOK_LIMIT_S and never raise, whatever the other ranks do: the
    rank that serves the board may be the lost one.
    """

    # The rank whose process serves the board; None: no rank of the group, or unknown.
    host_rank: int | None = None

    @abstractmethod
    def post(self, text: str) -> None:
        """Publish this rank's report; a later one replaces it. Local."""

    @abstractmethod
    def read(self) -> Mapping[int, str] | None:
        """Return the reports so far, by rank; None if the board does not answer. Local.

        Called every SLICE_S of a wait, nearly always when there are no reports, so that case must
        be cheap. Also called once after the first exchange, when every rank has its board.
        """

    @abstractmethod
    def last_known(self) -> Mapping[int, str]:
        """Return the reports received so far, by rank, also in an interrupted read. Local."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """The report of a rank that cannot continue.

    exchange: number of collectives run so far.   call: number of those with the same phase.
    waited_s: seconds that the rank had waited.
    gave_up_on: the ranks that it reports as missing; None: it still collects reports.
    reason: the error that made it leave without waiting; '' if it waited.
    """

    exchange: int
    call: int
    phase: str
    waited_s: float
    gave_up_on: tuple[int, ...] | None = None
    reason: str = ""

    @classmethod
    def parse(cls, text: str) -> _Report:
        values = json.loads(text)
        if values["gave_up_on"] is not None:
            values["gave_up_on"] = tuple(values["gave_up_on"])
        return cls(**values)


class BoundedWait:
    """Runs the exchanges of one rank with a deadline each; after a failure every call raises."""

    def __init__(self, failure_board: FailureBoard, *, rank: int, world_size: int) -> None:
        """Wait at most `timeout_s` for the other ranks; it may be changed between runs."""
        self.timeout_s = DEFAULT_TIMEOUT_S
        self._failure_board = failure_board
        self._rank = rank
        self._world_size = world_size
        self._num_exchanges = 0
        self._num_calls: Counter[str] = Counter()
        self._phase = ""
        self._failure: EPError | None = None

    def check(self) -> None:
        """Raise the error that ended an earlier exchange, before a new one writes anything.

        Local.
        """
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def fail(self, error: EPError) -> None:
        """Make every later call raise `error`, and end the waits of the other ranks with it.

        Local; returns within 2 * LOOK_LIMIT_S.
        """
        self._failure = error
        report = _Report(
            exchange=self._num_exchanges,
            call=0,
            phase="",
            waited_s=0.0,
            gave_up_on=(),
            reason=str(error),
        )
        self._failure_board.post(json.dumps(asdict(report)))

    def check_others(self) -> None:
        """Raise if another rank has given up, although the last exchange of this rank has ended.

        A rank that comes late may find messages of ranks that no longer wait for it. Local; reads
        the failure board.

        Raises:
            EPTimeout: see run().
        """
        self.finish(lambda _seconds: True, self._phase, time.monotonic(), has_waited=True)

    def run(self, start: Callable[[], Step], phase: str) -> None:
        """Start an exchange and wait for its end.

        Args:
            start: begins the exchange and returns its Step; its own errors propagate.
            phase: the purpose of the exchange, for messages: `dispatch counts`.

        Collective: yes.   Host sync: yes, until the exchange is complete.
        Lifetime: after an EPTimeout the transport may still access the tensors of the exchange,
            so the Step must keep them alive.
        Raises:
            EPTimeout: the exchange did not end in time, the transport broke, or another rank gave
                up; at most GRACE_S + 2 * LOOK_LIMIT_S after the deadline. Every later call raises
                the same immediately and starts nothing.
        """
        start_s = self.begin(phase)
        self.finish(start(), phase, start_s)

    def begin(self, phase: str) -> float:
        """Count an exchange that the caller starts now and then completes itself or by finish().

        Returns: the time on the monotonic clock.

        Local; before the second exchange it reads the failure board, which all ranks have by then.
        Raises:
            EPTimeout: an earlier exchange failed.
        """
        if self._failure is not None:
            self.check()
        if self._num_exchanges == 1:
            self._failure_board.read()
        self._num_exchanges += 1
        self._num_calls[phase] += 1
        self._phase = phase
        return time.monotonic()

    def finish(self, step: Step, phase: str, start_s: float, *, has_waited: bool = False) -> None:
        """Wait for the end of the exchange that begin() counted; see run().

        has_waited: the caller has already waited SLICE_S, so the board is read first.
        """
        deadline_s = start_s + self.timeout_s
        fault = "" if has_waited and self._failure_board.read() else self._wait(step, deadline_s)
        if fault is None:
            return
        report = _Report(
            exchange=self._num_exchanges,
            call=self._num_calls[phase],
            phase=phase,
            waited_s=time.monotonic() - start_s,
        )
        self._failure = self._give_up(report, deadline_s, fault)
        raise self._failure

    def _wait(self, step: Step, deadline_s: float) -> str | None:
        """Return None if the exchange is complete, else the error of the transport or ''."""
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if step(min(SLICE_S, left_s)):
                    return None
                if self._failure_board.read():
                    return ""
        except RuntimeError as error:
            return _first_sentence(error)
        return ""

    def _give_up(self, report: _Report, deadline_s: float, fault: str) -> EPTimeout:
        """Post a report, collect the reports of the others, and return the error."""
        self._failure_board.post(json.dumps(asdict(report)))
        others, is_whole = self._collect(deadline_s)
        # Ranks that gave up earlier, or whose board still answered, have better information.
        blamed = {rank for other in others.values() for rank in other.gave_up_on or ()}
        host_rank = self._failure_board.host_rank
        if is_whole:
            blamed.update(r for r in range(self._world_size) if r not in (self._rank, *others))
        elif not blamed and host_rank not in (None, self._rank):
            # The rank that serves the silent board.
            blamed.add(host_rank)
        report = replace(report, gave_up_on=tuple(sorted(blamed)))
        self._failure_board.post(json.dumps(asdict(report)))
        what, advice = self._explain(report, others, is_whole=is_whole)
        strays = "".join(
            f"; rank {rank} was in {other.phase}, call {other.call}, exchange {other.exchange}"
            for rank, other in sorted(others.items())
            if (other.exchange, other.phase) != (report.exchange, report.phase) and not other.reason
        )
        says = f"; the transport says: {fault}" if fault else ""
        error = EPTimeout(
            f"{report.phase}: {what} (call {report.call}, exchange {report.exchange}, waited "
            f"{report.waited_s:.1f} s; this is rank {self._rank} of {self._world_size}){strays}"
            f"{says}; {advice}, then make an EPGroup over a new process group or communicator"
        )
        error.phases = tuple(other.phase for other in others.values())
        return error

    def _collect(self, deadline_s: float) -> tuple[dict[int, _Report], bool]:
        """Wait for the reports of the other ranks.

        If the transport broke early, this waits until the deadline, because a rank that is busy
        computing reports only when it arrives. It waits only GRACE_S once the deadline has passed,
        another rank has given up, the board does not answer, or a single rank has not reported:
        when the transport is broken, that rank is the lost one.

        Returns:
            The reports, and whether they are complete; False if the board stopped answering.
        """
        seen: dict[int, _Report] | None = None
        end_s: float | None = None
        while True:
            texts = self._failure_board.read()
            if texts is not None:
                seen = self._parsed(texts)
            num_silent = self._world_size - 1 - len(seen or ())
            if num_silent == 0:
                return seen or {}, True
            now_s = time.monotonic()
            has_ended = any(other.gave_up_on is not None for other in (seen or {}).values())
            if end_s is None and (
                now_s >= deadline_s or has_ended or texts is None or num_silent == 1
            ):
                end_s = now_s + GRACE_S
            if end_s is not None and now_s >= end_s:
                # If the board stopped answering after the rank that serves it had reported, that
                # rank has ended like the others and the reports count. Otherwise it is lost.
                has_host = self._failure_board.host_rank in (None, self._rank, *(seen or ()))
                is_whole = texts is not None or (bool(seen) and has_host)
                return (seen or {}) | self._parsed(self._failure_board.last_known()), is_whole
            time.sleep(POLL_S)

    def _parsed(self, texts: Mapping[int, str]) -> dict[int, _Report]:
        return {r: _Report.parse(text) for r, text in texts.items() if r != self._rank}

    def _explain(
        self, own: _Report, others: Mapping[int, _Report], *, is_whole: bool
    ) -> tuple[str, str]:
        """Return the cause and the remedy for the message."""
        blamed = own.gave_up_on or ()
        reasons = [f"rank {r} left: {o.reason}" for r, o in sorted(others.items()) if o.reason]
        if reasons:
            return "; ".join(reasons), "check the rank named"
        if self._rank in blamed:
            impatient = [r for r, other in others.items() if self._rank in (other.gave_up_on or ())]
            return (
                f"this rank came too late: {describe_ranks(sorted(impatient))} had given up on "
                f"{describe_ranks(blamed)}",
                "find what delayed it or raise EPConfig.timeout_s",
            )
        if blamed:
            is_silent = not is_whole and blamed == (self._failure_board.host_rank,)
            why = ", and the store in its process does not answer" if is_silent else ""
            return (
                f"{describe_ranks(blamed)} did not arrive{why}",
                "check whether it is alive, or raise EPConfig.timeout_s if it was only slow",
            )
        if not is_whole:
            return (
                "the exchange did not end, and the missing ranks are unknown because the "
                "failure board does not answer",
                "check which processes have ended",
            )
        return (
            "no rank is missing, but the exchange did not end in time",
            "call in the same order on all ranks, or raise EPConfig.timeout_s",
        )


def _first_sentence(error: RuntimeError) -> str:
    """Return an error without source file and advice: `Connection closed by peer [::1]:2000`."""
    line = str(error).partition("\n")[0]
    if line.startswith("[/"):
        line = line.partition("] ")[2]
    return line.partition(". ")[0].rstrip(".")
