"""Reasons why the capabilities of a buffer do not cover a BufferSpec."""

from epcomm.config import Mode
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import WireDtype


def carrying_reasons(spec: BufferSpec, caps: BufferCaps) -> list[str]:
    """Return the reasons why a buffer does not support the rows of a specification."""
    reasons = []
    if spec.dispatch_format.dtype not in caps.wire_dtypes:
        carried = sorted(dtype.value for dtype in caps.wire_dtypes)
        reasons.append(f"carries {carried}, not {spec.dispatch_format}")
    sums = spec.combine_format
    if sums is not None and sums.dtype not in caps.combine_dtypes:
        returned = ", ".join([str(spec.hidden_format), *sorted(caps.combine_dtypes)])
        only = ", which deep_ep_v1 has in low latency" if sums.dtype is WireDtype.LOGFMT10 else ""
        reasons.append(f"returns sums as {returned}, not as {sums}{only}")
    gradients, quantised = spec.backward_format, caps.backward_dtypes if caps.trainable else ()
    if gradients is not None and gradients.dtype not in quantised:
        sent = f"sends gradients as {spec.hidden_format}" if caps.trainable else "has no gradients"
        reasons.append(f"{sent}, but EPConfig.backward_dtype is {gradients.dtype.value}")
    if caps.max_top_k is not None and spec.top_k > caps.max_top_k:
        reasons.append(f"top_k is {spec.top_k}, at most {caps.max_top_k}")
    size, multiple = spec.hidden_size, caps.hidden_multiple
    if size % multiple:
        reasons.append(f"hidden_size is {size}, expected a multiple of {multiple}")
    return reasons


def limit_reasons(spec: BufferSpec, caps: BufferCaps, mode: Mode) -> list[str]:
    """Return the reasons why a buffer does not support the limits of a specification."""
    reasons = []
    wanted, kept = spec.batches_in_flight, caps.batches_in_flight
    if wanted is not None and kept is not None and wanted > kept and not caps.batches_on_request:
        reasons.append(f"keeps {kept} batches in flight, not {wanted}")
    max_tokens, most = spec.max_tokens_per_rank, caps.max_tokens_per_rank
    if max_tokens is not None and most is not None and max_tokens > most:
        reasons.append(f"max_tokens_per_rank is {max_tokens}, at most {most}")
    if not caps.is_static:
        if spec.max_recv_slots is not None:
            reasons.append("has exact sizes and no slot budget; leave max_recv_slots None")
        return reasons
    if max_tokens is None:
        reasons.append("has static sizes; set max_tokens_per_rank")
    if mode is Mode.NORMAL and spec.max_recv_slots is None:
        reasons.append("has static sizes; set max_recv_slots")
    if spec.max_recv_slots is not None and not caps.has_slot_budget:
        reasons.append("has capacity for any routing and no slot budget; leave max_recv_slots None")
    return reasons


def batches_in_flight_of(spec: BufferSpec, caps: BufferCaps) -> int | None:
    """Return the most batches in flight for a specification; None for no limit."""
    if spec.batches_in_flight is None or not caps.batches_on_request:
        return caps.batches_in_flight
    return spec.batches_in_flight


def max_tokens_of(spec: BufferSpec, caps: BufferCaps) -> int | None:
    """Return the most tokens that a rank may dispatch: the smaller of both limits, or None."""
    limits = [spec.max_tokens_per_rank, caps.max_tokens_per_rank]
    return min((limit for limit in limits if limit is not None), default=None)
