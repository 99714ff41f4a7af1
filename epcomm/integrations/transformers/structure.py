"""List the names of parts of MoE blocks with their meanings; any other name is refused.

A name suggests the function of its part; probing.py checks that the block uses the part in this
way.
Source: the blocks of transformers 5.23.
"""

import inspect
import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from epcomm.blocks import BlockLayout
from epcomm.errors import ConfigError
from epcomm.weights.unquantized import Activation, ExpertFormat, ExpertWeights

# Child or tensor of a block -> the field of BlockLayout that names it.
_PARTS: Mapping[str, str] = {
    "gate": "router",
    "router": "router",
    "expert_bias": "correction_bias",
    "e_score_correction_bias": "correction_bias",
    "shared_experts": "shared_experts",
    "shared_expert": "shared_experts",
    "shared_mlp": "shared_experts",
    "shared_expert_gate": "shared_experts_gate",
    "fc1_latent_proj": "latent_in",
    "fc2_latent_proj": "latent_out",
    "post_mlp_layernorm": "output_norm",
}
# Remedies for a block whose structure is not recognised, and for one that no part of epcomm serves.
REMEDY = (
    "assemble ExpertParallelMoE from its parts, or try register_expert_parallel on the whole model"
)
_IDENTITY = "identity_expert"
_KEEP_BLOCK = "keep the model's own block, because epcomm serves no identity experts"
# Known part or attribute that ExpertParallelMoE does not have -> the reason in the message.
_NOT_BUILT: Mapping[str, str] = {
    _IDENTITY: "experts that return their input are not built",
    "post_expert_norm": "a norm after each expert is not built",
    "self_attn": "a whole decoder layer is no block of experts",
}
# Dotted names below the router of a correction bias that the block itself does not have.
_ROUTER_BIASES = ("e_score_correction_bias", "moe_statics.e_score_correction_bias")

# Attributes that repeat sizes, or facts that the parts themselves show.
_SIZES = frozenset(
    {
        *("config", "ffn_dim", "hidden_dim", "hidden_size", "input_size", "intermediate_dim"),
        *("intermediate_size", "layer_idx", "num_experts", "num_shared_experts", "expert_dim"),
        "top_k",
        # The probe observes how the block calls its router.
        "is_hash",
        "use_expert_bias",
        # The sum of two bfloat16 values is the same, whether the cast to float32 comes before the
        # sum or inside.
        "enable_moe_fp32_combine",
        # transformers sets this attribute when the weights are initialised.
        "_is_hf_initialized",
        # FSDP sets these attributes on all modules inside the one that it wraps.
        "_fsdp_use_orig_params",
        "_is_fsdp_managed_module",
    }
)
_NOISE = frozenset({"jitter_noise", "input_jitter_noise"})
_SCALE, _COMBINATION = "routed_scaling_factor", "shared_expert_combination_strategy"
_AVERAGES: Mapping[str, bool] = {"sum": False, "average": True}

# Parameter of the experts -> the field of ExpertWeights.
_WEIGHTS: Mapping[str, str] = {
    "gate_up_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "gate_up_proj_bias": "gate_up_bias",
    "up_proj_bias": "gate_up_bias",
    "down_proj_bias": "down_bias",
}
# Attributes that transformers' decorator sets on experts.
_TRANSPOSED, _CONCATENATED = "is_transposed", "is_concatenated"
_NO_FLAGS = ("has_post_expert_norm", "_is_expert_parallel")
_FLAGS = (_TRANSPOSED, _CONCATENATED, "has_gate", "has_bias", *_NO_FLAGS)
_ALPHAS, _LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
# Names of act_fn, a function or a module, that mean the activation; clamped experts compute the
# activation in their own code. transformers' SiLUActivation wraps torch's SiLU.
_SILU = ("SiLUActivation", "SiLU", "silu")
_ACT_FN_NAMES: Mapping[Activation, tuple[str, ...]] = {
    Activation.SWIGLU: _SILU,
    Activation.CLAMPED_SWIGLU: ("NoneType",),
    Activation.LIMITED_SWIGLU: (*_SILU, "NoneType"),
    Activation.RELU2: ("ReLUSquaredActivation",),
}


def read_layout(block: nn.Module) -> BlockLayout:
    """Return the layout that a block's names suggest; the probe finds router_inputs."""
    if not isinstance(getattr(block, "experts", None), nn.Module):
        raise refusal(f"{_kind(block)} has no experts", "a block with the child 'experts'")
    names: dict[str, str] = {}
    for name in parts_of(block):
        field = _PARTS.get(name)
        if field is None:
            raise _unknown(block, name)
        if field in names:
            raise refusal(f"{_kind(block)} has {names[field]} and {name}", f"one {field}")
        names[field] = name
    if "router" not in names:
        raise refusal(f"{_kind(block)} has no router", "a child 'gate' or 'router'")
    names |= _bias_of_router(block, names)
    _check_takes(block, 1, extra={"input_ids"})
    settings = _settings(block, {*_NOISE, _SCALE, _COMBINATION})
    for name in _NOISE:
        if settings.get(name):
            raise refusal(
                f"router jitter of {_kind(block)} is {settings[name]}",
                "0, because noise on the input is not supported",
                "set router_jitter_noise=0",
            )
    combination = str(settings.get(_COMBINATION, "sum"))
    if combination not in _AVERAGES:
        raise refusal(
            f"{_COMBINATION} of {_kind(block)} is {combination!r}", f"one of {sorted(_AVERAGES)}"
        )
    return BlockLayout(
        **names,  # type: ignore[arg-type]
        averages_shared_experts=_AVERAGES[combination],
        routed_scale=float(settings.get(_SCALE, 1.0)),  # type: ignore[arg-type]
    )


def parts_of(block: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Return the children and the own tensors of a block except the experts, by name."""
    parts: dict[str, nn.Module | Tensor] = dict(block.named_children())
    parts |= dict(block.named_parameters(recurse=False)) | dict(block.named_buffers(recurse=False))
    return {name: part for name, part in parts.items() if name != "experts"}


def read_experts(experts: nn.Module) -> tuple[ExpertWeights, dict[str, str]]:
    """Return the experts, and the names of their parameters by field of ExpertWeights."""
    _check_takes(experts, 3)
    tensors = dict(experts.named_parameters()) | dict(experts.named_buffers())
    for name in (*dict(experts.named_children()), *tensors):
        if name not in _WEIGHTS and name != "act_fn":
            raise _unknown(experts, name)
    names = {_WEIGHTS[name]: name for name in tensors if name in _WEIGHTS}
    for field in ("gate_up_proj", "down_proj"):
        if field not in names:
            raise refusal(f"{_kind(experts)} has no {field}", "experts in two tensors of [E, ...]")
    expert_format = _read_format(experts, has_gate=names["gate_up_proj"] != "up_proj")
    _check_activation(experts, expert_format.activation)
    found = {field: tensors[name] for field, name in names.items()}
    return ExpertWeights(**found, format=expert_format), names


def _read_format(experts: nn.Module, *, has_gate: bool) -> ExpertFormat:
    settings = _settings(experts, {*_FLAGS, *_ALPHAS, *_LIMITS, "act_fn"})
    for name in _NO_FLAGS:
        if settings.get(name, False):
            raise refusal(f"{name} of {_kind(experts)} is {settings[name]}", "False")
    alpha = _one_of(experts, settings, _ALPHAS)
    limit = _one_of(experts, settings, _LIMITS)
    if limit is not None and math.isinf(limit):
        limit = None
    if not has_gate:
        activation = Activation.RELU2
    elif limit is None and alpha is None:
        activation = Activation.SWIGLU
    else:
        activation = Activation.LIMITED_SWIGLU if alpha is None else Activation.CLAMPED_SWIGLU
    return ExpertFormat(
        activation=activation,
        is_transposed=bool(settings.get(_TRANSPOSED, False)),
        is_interleaved=not settings.get(_CONCATENATED, True),
        alpha=alpha,
        limit=limit,
    )


def router_settings(router: nn.Module) -> dict[str, object]:
    """Return the attributes that decide how a router routes, and its children without tensors.

    Sizes are left out. Children with tensors make the logits, and so do the tensors of the router
    itself.
    """
    has_tensors = {name.partition(".")[0] for name in router.state_dict(keep_vars=True)}
    others = {n: one for n, one in router.named_children() if n not in has_tensors}
    return _attributes(router) | others


def refusal(came: str, expected: str, remedy: str = REMEDY) -> ConfigError:
    """Return the error about a block that from_transformers does not take."""
    return ConfigError(f"from_transformers: {came}, expected {expected}; {remedy}")


def _unknown(module: nn.Module, name: str) -> ConfigError:
    why = _NOT_BUILT.get(name, "an unknown part")
    remedy = _KEEP_BLOCK if name == _IDENTITY else REMEDY
    return refusal(f"{_kind(module)} has {name}, {why}", "a block of known parts", remedy)


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module but for sizes, parts, and those of every module."""
    others = {*vars(nn.Module()), *_SIZES}
    return {name: value for name, value in vars(module).items() if name not in others}


def _settings(module: nn.Module, known: Iterable[str]) -> dict[str, object]:
    """Return the attributes that decide what is computed, and refuse unknown ones."""
    known = set(known)
    found = _attributes(module)
    for name, value in found.items():
        # Other blocks of this class have the part, and this block does not.
        is_absent = value is None and name in _PARTS
        if name not in known and not is_absent:
            raise refusal(
                f"{name} of {_kind(module)} is {value!r}, an unknown attribute",
                f"no other than {sorted(known)}",
            )
    return found


def _bias_of_router(block: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Return the name of a correction bias in the router, if the block itself has none."""
    router = block.get_submodule(names["router"])
    tensors = {*dict(router.named_parameters()), *dict(router.named_buffers())}
    found = [name for name in _ROUTER_BIASES if name in tensors]
    if not found or "correction_bias" in names:
        return {}
    return {"correction_bias": f"{names['router']}.{found[0]}"}


def _check_takes(module: nn.Module, num_inputs: int, *, extra: Iterable[str] = ()) -> None:
    """Raise ConfigError unless forward takes num_inputs arguments, and otherwise only `extra`."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(names) < num_inputs or set(names[num_inputs:]) - set(extra):
        raise refusal(
            f"{_kind(module)} is called with ({', '.join(names)})",
            f"{num_inputs} argument{'' if num_inputs == 1 else 's'}",
        )


def check_num_experts(block: nn.Module) -> None:
    """Raise ConfigError where num_experts of a block is not the number of its experts."""
    held = next(block.get_submodule("experts").parameters(), None)
    named = getattr(block, "num_experts", None)
    if held is not None and named is not None and named != held.shape[0]:
        expected = f"{held.shape[0]}, as its experts are"
        raise refusal(f"num_experts of {_kind(block)} is {named}", expected)


def _check_activation(experts: nn.Module, activation: Activation) -> None:
    act_fn = getattr(experts, "act_fn", None)
    found = getattr(act_fn, "__name__", type(act_fn).__name__)
    expected = _ACT_FN_NAMES[activation]
    if found not in expected:
        remedy = f"these experts are built with {activation.value} alone"
        raise refusal(f"act_fn of {_kind(experts)} is {found}", expected[0], remedy)


def _one_of(experts: nn.Module, values: Mapping[str, object], names: Iterable[str]) -> float | None:
    """Return the value of an attribute that has several names, whose values must agree."""
    found = {float(values[name]) for name in names if values.get(name) is not None}  # type: ignore[arg-type]
    if len(found) > 1:
        raise refusal(f"{_kind(experts)} has {list(names)} of {sorted(found)}", "one value")
    return found.pop() if found else None
