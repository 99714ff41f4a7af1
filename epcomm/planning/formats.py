"""The formats of rows on the wire, and the BufferSpec of a phase that has them."""

from dataclasses import replace

from epcomm.config import EPConfig
from epcomm.errors import ConfigError
from epcomm.spec import BufferSpec, MoESpec
from epcomm.types import ScaleDtype, WireDtype, WireFormat


def buffer_spec(config: EPConfig, spec: MoESpec, world_size: int, wanted: WireFormat) -> BufferSpec:
    """Return the specification of a buffer for the configuration of a phase and the layer.

    wanted: the format that the experts read best, unless the configuration names one.
    """
    if spec.num_experts % world_size:
        raise ConfigError(
            f"plan: num_experts is {spec.num_experts}, expected a multiple of the {world_size} "
            "ranks; use a number of ranks that divides it"
        )
    hidden_format = _hidden_format(config, spec, wanted)
    dispatch_format = _dispatch_format(config, hidden_format, wanted)
    formats = {"dispatch_dtype": dispatch_format}
    for field in ("combine_dtype", "backward_dtype"):
        dtype: WireDtype | None = getattr(config, field)
        if dtype is not None:
            formats[field] = WireFormat(dtype=dtype)
    for field, wire in formats.items():
        _check_quantized(wire, field, hidden_format, spec.hidden_size)
    _check_int8_profile(config, dispatch_format, wanted)
    _check_sum_groups(config, spec, world_size)
    return BufferSpec(
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        num_local_experts=spec.num_experts // world_size,
        dispatch_format=dispatch_format,
        hidden_format=hidden_format,
        combine_format=formats.get("combine_dtype"),
        backward_format=formats.get("backward_dtype"),
        max_tokens_per_rank=config.max_tokens_per_rank,
        max_recv_slots=config.max_recv_slots,
        compares_calls=config.check_calls,
        num_sms=config.num_sms,
        batches_in_flight=config.batches_in_flight,
        sum_groups=config.sum_groups,
        # Replicas and moved experts spread the experts of a group over ranks.
        sums_at_source=config.sum_groups is not None and config.redundant_experts is not None,
    )


def _check_quantized(
    wire: WireFormat, field: str, hidden_format: WireFormat, hidden_size: int
) -> None:
    """Refuse a format that hidden states of this dtype and size cannot be quantised to."""
    if wire.dtype.is_quantized and hidden_format.dtype is WireDtype.FP64:
        raise ConfigError(
            f"plan: rows are sent as {wire}, but the hidden states are {hidden_format}; expected "
            f"bf16, fp16 or fp32, which can be quantised, or {field} None"
        )
    if hidden_size % wire.dtype.per_item:
        raise ConfigError(
            f"plan: rows are sent as {wire}, but hidden_size is {hidden_size}; expected a multiple "
            f"of {wire.dtype.per_item}, or another {field}"
        )


def _check_sum_groups(config: EPConfig, spec: MoESpec, world_size: int) -> None:
    """Check that the logical experts form sum_groups groups, and that ranks hold whole groups."""
    groups, num_logical = config.sum_groups, spec.num_experts - (config.redundant_experts or 0)
    if groups is None:
        return
    if num_logical % groups:
        raise ConfigError(
            f"plan: sum_groups is {groups}, expected a divisor of the {num_logical} experts; use "
            "the largest number of ranks that any run of this model will have"
        )
    if config.redundant_experts is None and groups % world_size:
        raise ConfigError(
            f"plan: sum_groups is {groups}, expected a multiple of the {world_size} ranks, because "
            "a rank holds whole groups; use a multiple that divides the number of experts"
        )
    for field in ("combine_dtype", "backward_dtype"):
        if config.redundant_experts is not None and getattr(config, field) is not None:
            raise ConfigError(
                f"plan: {field} is {getattr(config, field).value} with sum_groups and "
                "redundant_experts, where results return before they are summed, and their sums "
                "would have other bits than without redundant_experts; leave one of the three None"
            )


def _hidden_format(config: EPConfig, spec: MoESpec, wanted: WireFormat) -> WireFormat:
    """Return the format of rows that are not quantised: the hidden states' unless configured.

    Experts that are not quantised compute in any floating dtype, whatever they are held in.
    """
    dtype = config.dispatch_dtype
    if dtype is None or dtype.is_quantized or wanted.dtype.is_quantized:
        return WireFormat.of(spec.dtype)
    return WireFormat(dtype=dtype)


def _dispatch_format(config: EPConfig, hidden_format: WireFormat, wanted: WireFormat) -> WireFormat:
    """Return the format of dispatch: that of the configuration, or what the experts need."""
    dtype = config.dispatch_dtype
    chosen = wanted if dtype is None else _wire_format(dtype, hidden_format, wanted)
    if config.dispatch_scales is None:
        return chosen
    scales = ScaleDtype(config.dispatch_scales)
    if chosen.dtype is WireDtype.FP8_E4M3 or chosen.scale_dtype is scales.torch_dtype:
        return replace(chosen, scale_dtype=scales.torch_dtype)
    asked = "None" if dtype is None else dtype.value
    raise ConfigError(
        f"plan: dispatch_scales is {scales.value}, but rows are sent as {chosen} (dispatch_dtype "
        f"is {asked}, the experts need {wanted}); expected fp8_e4m3 rows for these scales, set "
        "dispatch_dtype or leave dispatch_scales None"
    )


def _wire_format(dtype: WireDtype, hidden_format: WireFormat, wanted: WireFormat) -> WireFormat:
    """Return the format that a configured dispatch_dtype means."""
    if dtype is wanted.dtype:
        return wanted
    if dtype.is_quantized:
        return WireFormat(dtype=dtype)
    # Quantised experts return one dtype; _hidden_format() has followed any other choice.
    if dtype is not hidden_format.dtype:
        raise ConfigError(
            f"plan: dispatch_dtype is {dtype.value}, but the hidden states are {hidden_format}; "
            "expected that, a quantised format, or None"
        )
    return hidden_format


def _check_int8_profile(config: EPConfig, dispatched: WireFormat, wanted: WireFormat) -> None:
    """Refuse an arithmetic that nothing uses."""
    if config.int8_profile is None or WireDtype.INT8 in (dispatched.dtype, wanted.dtype):
        return
    raise ConfigError(
        f"plan: int8_profile is {config.int8_profile}, but rows are sent as {dispatched} and the "
        f"experts need {wanted}; expected int8 in one of them, set dispatch_dtype or leave "
        "int8_profile None"
    )
