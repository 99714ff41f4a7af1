"""Describe how a model turns router logits into experts and weights, in one record.

Models agree on the steps and differ in the settings. Every setting on which two implementations of
one routing were seen to disagree is a field of RoutingSpec, so nothing is left to convention.
"""

import math
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Protocol

from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.records import TopKOutput
from epcomm.types import enum_member, is_size


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

        Returns: topk_ids [T, K], int64, distinct within a row; topk_weights [T, K], float32.
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
        in addition. See CustomRoutingFunction.
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
            member = enum_member(f"RoutingSpec: {name}", kind, getattr(self, name))
            object.__setattr__(self, name, member)
        for name in ("top_k", "num_groups", "topk_groups", "group_score_top_n"):
            value = getattr(self, name)
            if not is_size(value):
                raise _refusal(name, value, "an integer of at least 1")
        if not isinstance(self.renormalize, bool):
            raise _refusal("renormalize", self.renormalize, "True or False")
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
            raise _refusal("top_k", self.top_k, f"at most {num_experts}, the number of experts")
        if not self.drops_groups:
            return
        if num_experts % self.num_groups:
            expected = f"a divisor of {num_experts}, the number of experts; groups have equal sizes"
            raise _refusal("num_groups", self.num_groups, expected)
        size = num_experts // self.num_groups
        if self.group_score_top_n > size:
            expected = f"at most {size}, the experts of a group; lower it or num_groups"
            raise _refusal("group_score_top_n", self.group_score_top_n, expected)
        if self.top_k > self.topk_groups * size:
            expected = f"at most {self.topk_groups * size}, the experts of topk_groups="
            raise _refusal("top_k", self.top_k, f"{expected}{self.topk_groups} groups; raise it")

    def _check_steps(self) -> None:
        if self.topk_groups > self.num_groups:
            expected = f"at most num_groups={self.num_groups}; lower it"
            raise _refusal("topk_groups", self.topk_groups, expected)
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
    field.name: type(field.default)
    for field in fields(RoutingSpec)
    if isinstance(field.default, Enum)
}


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _refusal(name, value, "a finite number above 0")


def _refusal(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"RoutingSpec: {name} is {value!r}, expected {expected}")
