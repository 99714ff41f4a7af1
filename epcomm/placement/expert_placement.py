"""ExpertPlacement: which logical expert each physical expert of a layer is a copy of."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Self

from epcomm.errors import ConfigError, describe_kind, shown
from epcomm.types import MAX_SIZE, is_size


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """The physical experts of one layer; equal on all ranks.

    num_experts: E, the logical experts, which are those of the model.
    num_ranks: W. Rank r holds the L = P / W physical experts from r * L on.
    num_hosts: hosts of the ranks, each with as many, in the order of the ranks.
    physical_to_logical: the logical expert of each of the P physical ones.
    prefers_near: tokens use the replicas on their rank, else those on its host, else all, in turn;
        the loads of copies then are those of the ranks nearby, and not equal. False: all, in turn.

    Worked example: 3 experts on 2 ranks as (0, 1, 2, 0): rank 0 holds [0, 1], rank 1 [2, 0], and
    expert 0 has the physical ids 0 and 3.
    """

    num_experts: int
    num_ranks: int
    num_hosts: int = 1
    physical_to_logical: tuple[int, ...]
    prefers_near: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.prefers_near, bool):
            raise _fault(f"prefers_near is {shown(self.prefers_near)}", "true or false")
        object.__setattr__(self, "physical_to_logical", tuple(self.physical_to_logical))
        check_sizes(
            "ExpertPlacement",
            num_experts=self.num_experts,
            num_ranks=self.num_ranks,
            num_hosts=self.num_hosts,
            num_physical_experts=self.num_physical_experts,
        )
        self._check_experts()

    @classmethod
    def spread(
        cls, *, num_experts: int, num_ranks: int, num_hosts: int = 1, num_physical_experts: int
    ) -> Self:
        """Place experts in the order of their ids, repeatedly until all P positions are filled.

        Without redundancy every rank holds the experts that it holds without a placement. Local.

        Raises:
            ConfigError: sizes that do not fit.
        """
        return cls(
            num_experts=num_experts,
            num_ranks=num_ranks,
            num_hosts=num_hosts,
            physical_to_logical=tuple(e % num_experts for e in range(num_physical_experts)),
        )

    @property
    def num_physical_experts(self) -> int:
        """The number of physical experts of all ranks, P."""
        return len(self.physical_to_logical)

    @property
    def num_local_experts(self) -> int:
        """The number of physical experts of one rank, L."""
        return self.num_physical_experts // self.num_ranks

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The physical ids of each logical expert, in rising order: one entry an expert."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for physical, logical in enumerate(self.physical_to_logical):
            found[logical].append(physical)
        return tuple(map(tuple, found))

    def rank_of(self, physical: int) -> int:
        """Return the rank that holds a physical expert."""
        return physical // self.num_local_experts

    def host_of(self, physical: int) -> int:
        """Return the host whose rank holds a physical expert."""
        return self.rank_of(physical) // (self.num_ranks // self.num_hosts)

    def experts_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the logical expert of each of the L physical experts of a rank."""
        first = rank * self.num_local_experts
        return self.physical_to_logical[first : first + self.num_local_experts]

    def replicas_for(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the replicas of each logical expert among which the tokens of a rank choose.

        With prefers_near, one expert a rank and two ranks a host, rank 1 chooses replica 0 of
        (0, 5), replica 1 of (1, 2), and both of (3, 4).
        """
        if not self.prefers_near:
            return self.replicas

        def nearest_of(copies: tuple[int, ...]) -> tuple[int, ...]:
            for ranks in (1, self.num_ranks // self.num_hosts):
                near = [each for each in copies if self.rank_of(each) // ranks == rank // ranks]
                if near:
                    return tuple(near)
            return copies

        return tuple(map(nearest_of, self.replicas))

    def describe(self) -> str:
        """Return one line with the numbers of experts, copies and ranks."""
        redundant = self.num_physical_experts - self.num_experts
        most = max(map(len, self.replicas))
        return (
            f"placement: {self.num_experts} experts and {redundant} redundant ones on "
            f"{self.num_ranks} ranks, {self.num_local_experts} each, at most {most} of one expert"
        )

    def as_json(self) -> str:
        """Return the placement as JSON, for from_json()."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what as_json() wrote.

        Raises:
            ConfigError: the text is not JSON, has other fields, or has an impossible placement.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"ExpertPlacement.from_json: the text is not JSON ({error}); pass what as_json() "
                "returned"
            ) from None
        fields = set(cls.__dataclass_fields__)
        # Older files have no prefers_near.
        if not isinstance(values, Mapping) or {*values, "prefers_near"} != fields:
            came = sorted(values) if isinstance(values, Mapping) else describe_kind(values)
            raise ConfigError(
                f"ExpertPlacement.from_json: the text holds {shown(came)}, expected an object with "
                f"{sorted(fields)}; pass what as_json() returned"
            )
        if not isinstance(values["physical_to_logical"], list):
            raise _fault(
                f"physical_to_logical is {describe_kind(values['physical_to_logical'])}",
                "a list of logical experts",
            )
        return cls(**values)

    def _check_experts(self) -> None:
        for physical, logical in enumerate(self.physical_to_logical):
            # Exactly int, because 0.0 and True are equal to ids of experts.
            if type(logical) is not int or not 0 <= logical < self.num_experts:
                raise _fault(
                    f"physical expert {physical} is a copy of {shown(logical)}",
                    f"a logical expert from 0 to {self.num_experts - 1}",
                )
        for logical, copies in enumerate(self.replicas):
            if not copies:
                raise _fault(
                    f"physical_to_logical has no copy of expert {logical}",
                    f"at least one of each of the {self.num_experts} logical experts",
                )
        for rank in range(self.num_ranks):
            held = self.experts_of_rank(rank)
            twice = sorted({logical for logical in held if held.count(logical) > 1})
            if twice:
                raise _fault(
                    f"rank {rank} holds {held.count(twice[0])} copies of expert {twice[0]}",
                    "at most one a rank, because a second copy does not reduce its load",
                )


def check_sizes(
    caller: str, *, num_experts: int, num_ranks: int, num_hosts: int, num_physical_experts: int
) -> None:
    """Refuse sizes that no placement can have. Local."""
    sizes = {"num_experts": num_experts, "num_ranks": num_ranks, "num_hosts": num_hosts}
    for name, size in {**sizes, "num_physical_experts": num_physical_experts}.items():
        if not is_size(size):
            raise ConfigError(
                f"{caller}: {name} is {shown(size)}, expected an int from 1 to {MAX_SIZE}; "
                "pass their number"
            )
    if num_ranks % num_hosts:
        raise ConfigError(
            f"{caller}: num_hosts is {num_hosts}, expected a divisor of the {num_ranks} ranks; "
            "all hosts must have equally many ranks"
        )
    most = num_experts * num_ranks
    if not num_experts <= num_physical_experts <= most or num_physical_experts % num_ranks:
        raise ConfigError(
            f"{caller}: there are {num_physical_experts} physical experts, expected a multiple of "
            f"the {num_ranks} ranks from {num_experts}, the logical experts, to {most}, one of "
            "each on every rank; change the number of redundant experts"
        )


def _fault(came: str, expected: str) -> ConfigError:
    return ConfigError(f"ExpertPlacement: {came}, expected {expected}; make it by balance()")
