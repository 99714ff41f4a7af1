"""The scenarios of lost ranks, and the outcome of each rank; for ranks, launcher and tests."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

# Seconds that ranks wait for each other before the fault: many processes start together.
SETUP_TIMEOUT_S = 60.0
# Seconds from the deadline until a lost rank must have been named, excluding those in which ranks
# had work and no core (Outcome.starved_s).
NAMING_LIMIT_S = 2.0
# Seconds for EPGroup.close() and for destroying the process group. A wait for a lost rank would
# take gloo's 30 minutes, or never end.
CLOSE_LIMIT_S = 15.0
# Timeout if the transport reports the loss, so that ranks need not wait for it: long enough that
# even a busy machine does not reach it.
PATIENT_TIMEOUT_S = 30.0
# Seconds from the end of a program to that of its process: the shutdown of an interpreter with
# torch takes 0.6 s, but 12 s when 12 of them do it on two busy cores. Far less than the 30 minutes
# of gloo, or the wait of MPI_Finalize, which has no end.
EXIT_LIMIT_S = 40.0
# A rank that learns of the loss exits with this plus its rank, to prove that the code is its own.
EXIT_CODE = 40


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A group of ranks, some of which are lost in their second call.

    transport: what the ranks exchange over. Over MPI, ranks of a hierarchical exchange are said to
        be on two hosts.
    fault: what happens to the lost ranks; a late rank arrives after all others have timed out.
        Hosts are killed with all their processes, or unplugged.
    phase: the phase that the lost ranks do not reach. `within` names an exchange of rows, after the
        headers of its call: a begun call is then between begin and wait.
    store_host: the rank that answers for the store of the process group; None: another process, as
        under torchrun; of several hosts it is on the first.
    destroys: ranks destroy the process group before they end.
    begins: the calls run on the thread of transfers, forward and backward.
    combine_dtype: see EPConfig.combine_dtype.
    num_hosts: simulated hosts (tests/hosts/network.py) with equally many ranks; 1: ranks are on
        this machine.
    """

    fault: Literal["killed", "stopped", "late", "unplugged"]
    phase: Literal[
        "dispatch",
        "combine",
        "backward",
        "within dispatch rows",
        "within combine",
        "within backward of dispatch",
    ]
    transport: Literal["gloo", "mpi", "shared_memory", "hierarchical", "hierarchical_mpi"] = "gloo"
    lost_ranks: tuple[int, ...] = (2,)
    store_host: int | None = None
    destroys: bool = True
    begins: bool = False
    combine_dtype: str | None = None
    num_ranks: int = 4
    num_hosts: int = 1

    @property
    def name(self) -> str:
        ranks = "".join(map(str, self.lost_ranks))
        host = "" if self.store_host is None else f"-store{self.store_host}"
        end = "" if self.destroys else "-undestroyed"
        on_hosts = "" if self.num_hosts == 1 else f"-hosts{self.num_hosts}"
        begun = "-begun" if self.begins else ""
        sums = f"-{self.combine_dtype}" if self.combine_dtype else ""
        phase = self.phase.replace(" ", "_")
        call = f"{self.transport}-{self.fault}-{phase}{begun}{sums}"
        return f"{call}-rank{ranks}{host}{end}{on_hosts}"

    def host_of(self, rank: int) -> int:
        return rank * self.num_hosts // self.num_ranks

    @property
    def is_over_mpi(self) -> bool:
        return self.transport in ("mpi", "hierarchical_mpi")

    @property
    def backend(self) -> str:
        backends = {
            "shared_memory": "shared_memory",
            "hierarchical": "hierarchical",
            "hierarchical_mpi": "hierarchical",
        }
        return backends.get(self.transport, "collective")

    @property
    def loses_hosts(self) -> bool:
        """Return whether all ranks of some host are lost, and the host with them."""
        living = {self.host_of(rank) for rank in self.survivors}
        return self.num_hosts > 1 and not living & {self.host_of(rank) for rank in self.lost_ranks}

    @property
    def has_news(self) -> bool:
        """Return whether ranks learn of the loss before the deadline; MPI does not report it."""
        is_lone = len(self.lost_ranks) == 1
        return self.fault == "killed" and not self.is_over_mpi and is_lone

    @property
    def timeout_s(self) -> float:
        return PATIENT_TIMEOUT_S if self.has_news else 2.0

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.lost_ranks]

    @property
    def ending(self) -> list[int]:
        return list(range(self.num_ranks)) if self.fault == "late" else self.survivors

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{**values, "lost_ranks": tuple(values["lost_ranks"])})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The observations of one rank.

    message: text of the EPTimeout.   elapsed_s: time from the call until the EPTimeout was raised.
    again: text of the EPTimeout of the next call.   again_s: time that the next call took.
    starved_s: total time in which threads of the rank had work but no core.
    close_s: time of EPGroup.close() and of destroying the process group.
    left_at_s: time of the end of the program, on the clock of all processes.
    """

    message: str
    elapsed_s: float
    again: str
    again_s: float
    starved_s: float
    close_s: float
    left_at_s: float

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"outcome{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> Self:
        return cls(**json.loads((folder / f"outcome{rank}.json").read_text()))
