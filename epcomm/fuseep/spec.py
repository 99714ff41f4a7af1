"""Describe the layer that a fused operator shall compute."""

from __future__ import annotations

from dataclasses import dataclass, fields

from epcomm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FuseEPSpec:
    """The sizes of one layer of W8A8 experts; equal on all ranks.

    hidden_size: H.   intermediate_size: I.   num_local_experts: L, so that E = L * W.   top_k: K.
    max_tokens_per_rank: M of the layer; a longer batch than the operator takes is cut into calls.
    max_recv_slots: most rows that a rank receives in one call; None: capacity for any routing.
    """

    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    top_k: int
    max_tokens_per_rank: int
    max_recv_slots: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_recv_slots":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"FuseEPSpec: {field.name} is {value!r}, expected an integer of at least 1"
                )
