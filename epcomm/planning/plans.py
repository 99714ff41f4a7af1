"""The records of a plan: the choice of each phase, the rejected candidates and why."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from epcomm.buffers.requirements import batches_in_flight_of, max_tokens_of
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import Mode
from epcomm.errors import grouped
from epcomm.registry import backend_class, fused_class, runner_class
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import ROW_MAJOR, Int8Profile, ScaleLayout, WeightsAppliedBy


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A backend or runner that does not serve this layer, with every reason.

    name: of the registry; where several classes of a backend may serve, with the class.
    """

    name: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The choice of mode, backend and formats for one phase of a layer.

    backend: registry name.   buffer: name of its class that mode, budget and `replicated` chose.
    weights_applied_by: the part that multiplies by topk_weights.
    rejected: the other backends and why.
    chosen_by: the configuration, measurements or rules, as text.
    scale_layout: of the scales of received rows, as the runner reads them.
    int8_profile: arithmetic of INT8 rows and between the products of INT8 experts.
    rounds_int8: there are INT8 rows or experts, so that int8_profile matters.
    refuses_gradients: why calls that need gradients are refused, over a trainable buffer too.
    """

    mode: Mode
    backend: str
    buffer: str
    buffer_spec: BufferSpec
    caps: BufferCaps
    weights_applied_by: WeightsAppliedBy
    world_size: int
    rejected: tuple[Rejection, ...]
    chosen_by: str
    scale_layout: ScaleLayout = ROW_MAJOR
    int8_profile: Int8Profile = Int8Profile.RINT127
    rounds_int8: bool = False
    refuses_gradients: str = ""

    def regions(self) -> tuple[Region, ...]:
        """Return the memory of one call, in order of use."""
        return backend_class(self.buffer).region_bytes(self.buffer_spec, self.world_size)

    def wire_bytes(self, call: CallShape, *, backward: bool = False) -> BufferTraffic:
        """Return the bytes that one rank sends to other ranks in `call`, or in its backward."""
        return backend_class(self.buffer).wire_bytes(self.buffer_spec, call, backward=backward)

    def header_bytes(self) -> int:
        """Return the bytes of counts, faults and flags that a rank sends in each dispatch."""
        return self._full_call(backward=False).control_bytes

    def max_bytes_per_token(self, *, backward: bool = False) -> Mapping[str, int]:
        """Return the most bytes that a token costs: its rows to other ranks, and their sums back.

        Without headers; rounded up. A static buffer sends that for each of M tokens, used or not.
        """
        most, num_tokens = self._full_call(backward=backward), self._full_tokens
        return {
            "dispatch": -(-most.dispatch_bytes // num_tokens),
            "combine": -(-most.combine_bytes // num_tokens),
        }

    def max_bytes_between_hosts(self) -> int | None:
        """Return the most bytes that a token costs between hosts, of its rows and their sums.

        Without headers; rounded up. None on one host, and where a package crosses hosts by itself.
        """
        return -(-self._full_call(backward=False).bytes_between // self._full_tokens) or None

    @property
    def is_trainable(self) -> bool:
        """Return whether calls may need gradients."""
        return self.caps.trainable and not self.refuses_gradients

    @property
    def is_capturable(self) -> bool:
        """Return whether calls may be captured in a device graph: not those of fused operators."""
        return self.caps.is_static and self.mode is not Mode.FUSEEP

    def limits(self) -> Mapping[str, str]:
        """Return the limits that a call may not exceed, as text by name."""
        spec, caps = self.buffer_spec, self.caps
        limits = {"tokens a rank": _limit(max_tokens_of(spec, caps))}
        if spec.max_recv_slots is not None:
            limits["received slots a rank"] = _limit(spec.max_recv_slots)
        if caps.max_top_k is not None:
            limits["top k"] = _limit(caps.max_top_k)
        if caps.hidden_multiple > 1:
            limits["hidden size"] = f"a multiple of {caps.hidden_multiple}"
        most_batches = batches_in_flight_of(spec, caps)
        if most_batches is not None:
            limits["batches in flight"] = _limit(most_batches)
        return limits

    def unusual(self) -> Mapping[str, str]:
        """Return the unusual properties of rows, experts and sums, as text by name."""
        found = {}
        if self.buffer_spec.sum_groups is not None:
            found["sums"] = self._describe_sums()
        if self.scale_layout != ROW_MAJOR:
            found["scales on arrival"] = str(self.scale_layout)
        if self.rounds_int8 and self.int8_profile is not Int8Profile.RINT127:
            found["int8 profile"] = self.int8_profile.value
        return found

    def _describe_sums(self) -> str:
        """Return how combine sums by group, and what that costs on the wire."""
        spec = self.buffer_spec
        unit = "slot, which the source rank sums" if spec.sums_at_source else "(token, group)"
        ungrouped = replace(self, buffer_spec=replace(spec, sum_groups=None, sums_at_source=False))
        cost, usual = (each.max_bytes_per_token()["combine"] for each in (self, ungrouped))
        text = (
            f"in {spec.sum_groups} groups of experts; combine returns a row for each {unit}, at "
            f"most {cost} B a token instead of {usual} B"
        )
        cost, usual = (each.max_bytes_between_hosts() for each in (self, ungrouped))
        if cost is not None:
            text += f", and between hosts, with dispatch, {cost} B instead of {usual} B"
        return text

    def explain(self, *, phase: str = "") -> str:
        """Return the choice, the rejected candidates with reasons, bytes and limits, as text."""
        lines = self.facts(phase=phase)
        lines.append(f"backend chosen by {self.chosen_by}")
        lines += [f"rejected {text}" for text in _texts_of(self.rejected)]
        return "\n".join(lines)

    def facts(self, *, phase: str = "") -> list[str]:
        """Return the choice, its bytes and its limits as texts. phase: the purpose of this plan."""
        spec, per_token = self.buffer_spec, self.max_bytes_per_token()
        combine = spec.combine_format or spec.hidden_format
        backward = spec.backward_format or spec.hidden_format
        facts = [
            f"mode {self.mode.value} on backend {self.backend} ({self.buffer}), {self.world_size} "
            f"ranks with {spec.num_local_experts} experts each{phase and f', for {phase}'}",
            f"wire: dispatch {spec.dispatch_format}, combine {combine} (backward {backward})",
            *(f"{name}: {text}" for name, text in self.unusual().items()),
            f"router weights applied by {self.weights_applied_by.value}; trainable: "
            f"{self.is_trainable}{self.refuses_gradients and f' ({self.refuses_gradients})'}; "
            f"is capturable: {self.is_capturable}; host syncs a dispatch: {self.caps.host_syncs}",
            f"at most {per_token['dispatch']} B a token in dispatch, {per_token['combine']} B in "
            f"combine, and {self.header_bytes()} B of headers a dispatch",
        ]
        between = self.max_bytes_between_hosts()
        if between is not None:
            facts.append(f"at most {between} B a token between hosts, in dispatch and combine")
        facts += [f"{name}: {limit}" for name, limit in self.limits().items()]
        return [*facts, *(f"memory of {region.name}: {region}" for region in self.regions())]

    @property
    def _full_tokens(self) -> int:
        """The T of a call that shows a token's cost; a multiple of W, which replicated tokens need.

        A static buffer sends M rows whatever T is.
        """
        max_tokens = self.buffer_spec.max_tokens_per_rank if self.caps.is_static else None
        return max_tokens or self.world_size

    def _full_call(self, *, backward: bool) -> BufferTraffic:
        spec = self.buffer_spec
        call = CallShape.most(
            *(self._full_tokens, spec.top_k, self.world_size, spec.hosts),
            returned_columns=spec.returned_columns(self.world_size),
        )
        return self.wire_bytes(call, backward=backward)


@dataclass(frozen=True, kw_only=True)
class EPPlan:
    """The choice for one layer: a plan of each phase, and the runner.

    prefill: for prefill and training.   decode: the same object, except in mode auto; None where
        decode_lacks names what is missing for it.
    runner: runner registry name; None if the plan was made without expert weights, and in mode
        fuseep, whose operators compute them.
    product_sms: most SMs of a GPU that the runner's products take; None: no limit, or no GPU.
    rejected_runners: those that cannot compute these experts.
    rests_on: with sum_groups, what must be equal wherever bits are compared, besides the plan.
    assumed: facts on which the plan relies without having checked them; empty for this machine.
    """

    prefill: PhasePlan
    decode: PhasePlan | None
    runner: str | None = None
    product_sms: int | None = None
    rejected_runners: tuple[Rejection, ...] = ()
    rests_on: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def decode_lacks(self) -> str | None:
        """The remedy if no backend serves decode; None otherwise."""
        if self.decode is not None:
            return None
        return "set EPConfig.max_tokens_per_rank, because low latency has static sizes"

    def phases(self) -> Mapping[str, PhasePlan]:
        """Return the distinct plans by the phases that they serve."""
        if self.decode is self.prefill:
            return {"": self.prefill}
        both = {"prefill and training": self.prefill, "decode": self.decode}
        return {name: phase for name, phase in both.items() if phase is not None}

    def explain(self) -> str:
        """Return the choice, the rejected candidates with reasons, bytes and limits, as text."""
        lines = [f"assumed: {fact}" for fact in self.assumed]
        lines += [phase.explain(phase=name) for name, phase in self.phases().items()]
        if self.decode is None:
            lines.append(f"no decode: {self.decode_lacks}")
        if self.runner is not None:
            note = runner_class(self.runner).note
            lines.append(f"runner {self.runner}{note and f': {note}'}")
        if self.product_sms is not None:
            lines.append(f"products on at most {self.product_sms} SMs of a GPU")
        if self.rests_on:
            lines.append(f"the same bits for any number of ranks rest on {self.rests_on}")
        if self.prefill.mode is Mode.FUSEEP:
            lines.append(f"experts computed by {self.prefill.backend} itself; y is reduced")
            deprecated = fused_class(self.prefill.buffer).deprecated
            lines += [f"{self.prefill.backend} is deprecated: {deprecated}"] if deprecated else []
        lines += [f"rejected runner {text}" for text in _texts_of(self.rejected_runners)]
        return "\n".join(lines)


def _texts_of(rejections: Iterable[Rejection]) -> list[str]:
    """Return one text for all that have the same reasons, in the order of the first of each."""
    names = grouped((each.reasons, each.name) for each in rejections)
    return [f"{', '.join(found)}: {'; '.join(reasons)}" for reasons, found in names.items()]


def _limit(value: int | None) -> str:
    return "no limit" if value is None else f"at most {value}"
