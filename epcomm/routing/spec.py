"""Describe how a model turns router logits into experts and weights, in one record.

Models agree on the steps and differ in the settings. Every setting on which two implementations of
one routing were seen to disagree is a field of RoutingSpec, so nothing is left to convention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Protocol

from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.records import TopKOutput


class ScoreFunction(StrEnum):
    """The function that turns a logit into a score."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"


class SoftmaxOrder(StrEnum):
    """The order of softmax and top-k: softmax over all experts, or over the selected ones."""

    BEFORE_TOPK = "before_topk"
    AFTER_TOPK = "after_topk"


class CorrectionBias(StrEnum):
    """What the per-expert bias is added to: the selection score alone, or the logit."""

    NONE = "none"
    SELECTION = "selection"
    SCORE = "score"


class DroppedGroups(StrEnum):
    """The selection score of experts in dropped groups: -inf or 0.0."""

    NEG_INF = "neg_inf"
    ZERO = "zero"


class EpsilonMode(StrEnum):
    """The divisor of renormalisation: sum, sum + epsilon, or max(sum, epsilon)."""

    NONE = "none"
    ADDED = "added"
    CLAMP = "clamp"


class CustomRoutingFunction(Protocol):
    """The signature of a routing that no RoutingSpec describes."""

    def __call__(
        self,
        logits: Tensor,
        *,
        top_k: int,
        correction_bias: Tensor | None,
        hidden_states: Tensor | None,
    ) -> TopKOutput:
        """Choose experts and weights.

        Args:
            logits: [T, E], as the caller of `route` gave them; T = 0 is legal.
            top_k: K, the experts of a token.
            correction_bias: [E] or None, as the caller gave it.
            hidden_states: [T, H] or None, as the caller gave them.

        Returns:
            topk_ids [T, K], int64, distinct within a row; topk_weights [T, K], float32.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """The routing of one model; the defaults are a plain softmax over all experts, then top-k.

    The steps, in order: softcap, bias inside the score, score function, bias for the selection,
    groups, top-k, softmax where it runs last, renormalisation, scaling.

    top_k: K, experts a token.
    score_function: how a logit becomes a score.
    softmax_order: with AFTER_TOPK logits are ranked and softmax sees only the selected ones.
    softcap: logits become softcap * tanh(logits / softcap), before any bias; None: no softcap.
    correction_bias: where the [E] bias acts; `route` needs it unless this is NONE.
    num_groups: experts form this many equal groups of neighbours; 1: no groups.
    topk_groups: groups a token may use; its other groups are dropped.
    group_score_top_n: a group scores the sum of its n best experts: 1 is the maximum, 2 is
        DeepSeek-V3's, top_k // topk_groups is Megatron's.
    dropped_groups: the score of experts of dropped groups in the selection.
    renormalize: divide the selected weights by their sum.
    epsilon_mode: how epsilon changes the sum that renormalisation divides by.
    epsilon: above 0 unless epsilon_mode is NONE; dimensionless, as the weights are.
    routed_scaling_factor: multiplies the weights at the end.
    custom_function: replaces every step above and returns a TopKOutput; only top_k may be set
        beside it. See CustomRoutingFunction.
    """

    top_k: int
    score_function: ScoreFunction = ScoreFunction.SOFTMAX
    softmax_order: SoftmaxOrder = SoftmaxOrder.BEFORE_TOPK
    softcap: float | None = None
    correction_bias: CorrectionBias = CorrectionBias.NONE
    num_groups: int = 1
    topk_groups: int = 1
    group_score_top_n: int = 1
    dropped_groups: DroppedGroups = DroppedGroups.NEG_INF
    renormalize: bool = False
    epsilon_mode: EpsilonMode = EpsilonMode.NONE
    epsilon: float = 0.0
    routed_scaling_factor: float = 1.0
    custom_function: CustomRoutingFunction | None = None

    def __post_init__(self) -> None:
        for name, kind in _ENUMS.items():
            # Plain strings are welcome (files, dictionaries); the fields hold the enums.
            object.__setattr__(self, name, _enum_member(name, kind, getattr(self, name)))
        for name in ("top_k", "num_groups", "topk_groups", "group_score_top_n"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.renormalize, bool):
            raise ConfigError(
                f"RoutingSpec: renormalize is {self.renormalize!r}, expected True or False"
            )
        _check_positive("routed_scaling_factor", self.routed_scaling_factor)
        if self.softcap is not None:
            _check_positive("softcap", self.softcap)
        self._check_steps()
        if self.custom_function is not None:
            self._check_custom()

    @property
    def drops_groups(self) -> bool:
        """Return whether a token may use only some of the groups of experts."""
        return self.topk_groups < self.num_groups

    def check_num_experts(self, num_experts: int) -> None:
        """Check that this routing is possible among E = num_experts experts.

        Raises:
            ConfigError: fewer experts than top_k, or groups that do not fit.
        """
        if self.top_k > num_experts:
            raise ConfigError(
                f"RoutingSpec: top_k is {self.top_k}, expected at most {num_experts}, the number "
                "of experts; lower it"
            )
        if not self.drops_groups:
            return
        if num_experts % self.num_groups:
            raise ConfigError(
                f"RoutingSpec: num_groups is {self.num_groups}, expected a divisor of "
                f"{num_experts}, the number of experts; groups have equal sizes"
            )
        group_size = num_experts // self.num_groups
        if self.group_score_top_n > group_size:
            raise ConfigError(
                f"RoutingSpec: group_score_top_n is {self.group_score_top_n}, expected at most "
                f"{group_size}, the experts of a group; lower it or num_groups"
            )
        if self.top_k > self.topk_groups * group_size:
            raise ConfigError(
                f"RoutingSpec: top_k is {self.top_k}, expected at most "
                f"{self.topk_groups * group_size}, the experts of topk_groups={self.topk_groups} "
                "groups; raise topk_groups"
            )

    def to_dict(self) -> dict[str, str | int | float | bool | None]:
        """Return field names and plain values, for files; from_mapping() is the inverse.

        Raises:
            ConfigError: a custom function has no plain value.
        """
        if self.custom_function is not None:
            raise ConfigError(
                "RoutingSpec.to_dict: custom_function is set, expected None; a function cannot be "
                "saved"
            )
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["custom_function"]
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values.items()
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> RoutingSpec:
        """Build a RoutingSpec from field names and plain values.

        Raises:
            ConfigError: an unknown field (the message lists the known ones) or a bad value.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"RoutingSpec.from_mapping: values has unknown fields {unknown}; known are "
                f"{sorted(known)}"
            )
        return cls(**values)  # type: ignore[arg-type]

    def _check_steps(self) -> None:
        if self.topk_groups > self.num_groups:
            raise ConfigError(
                f"RoutingSpec: topk_groups is {self.topk_groups}, expected at most "
                f"num_groups={self.num_groups}; lower it"
            )
        after_topk = self.softmax_order is SoftmaxOrder.AFTER_TOPK
        if after_topk and self.score_function is not ScoreFunction.SOFTMAX:
            raise ConfigError(
                f"RoutingSpec: softmax_order is 'after_topk' with score_function "
                f"{self.score_function.value!r}, expected 'softmax'; drop one of them"
            )
        if self.epsilon_mode is EpsilonMode.NONE:
            if self.epsilon != 0.0:
                raise ConfigError(
                    f"RoutingSpec: epsilon is {self.epsilon} with epsilon_mode 'none', expected "
                    "0.0; choose 'added' or 'clamp'"
                )
            return
        if not self.renormalize:
            raise ConfigError(
                f"RoutingSpec: epsilon_mode is {self.epsilon_mode.value!r} with renormalize=False, "
                "expected 'none'; an epsilon acts on renormalisation only"
            )
        _check_positive("epsilon", self.epsilon)

    def _check_custom(self) -> None:
        ignored = [
            field.name
            for field in fields(self)
            if field.name not in ("top_k", "custom_function")
            and getattr(self, field.name) != field.default
        ]
        if ignored:
            raise ConfigError(
                f"RoutingSpec: {ignored[0]} is set with custom_function, expected its default; "
                "the function replaces every step, so nothing would read it"
            )


_ENUMS: dict[str, type[Enum]] = {
    "score_function": ScoreFunction,
    "softmax_order": SoftmaxOrder,
    "correction_bias": CorrectionBias,
    "dropped_groups": DroppedGroups,
    "epsilon_mode": EpsilonMode,
}


def _enum_member(name: str, kind: type[Enum], value: object) -> Enum:
    try:
        return kind(value)
    except ValueError:
        allowed = [member.value for member in kind]
        raise ConfigError(f"RoutingSpec: {name} is {value!r}, expected one of {allowed}") from None


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"RoutingSpec: {name} is {value!r}, expected an integer of at least 1")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"RoutingSpec: {name} is {value!r}, expected a finite number above 0")
