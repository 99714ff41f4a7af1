"""The runners on imitations of Ascend's operators, against float64 models."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm import (
    Activation,
    BackendUnavailable,
    ConfigError,
    EPConfig,
    ExpertFormat,
    ExpertWeights,
    Int8ChannelWeights,
    Int8Profile,
    MaskedDispatchOutput,
    MoESpec,
    RowsDispatchOutput,
    ShapeError,
    WireDtype,
    WireFormat,
    WireTensor,
    plan,
)
from epcomm.quantization import INT8_PER_TOKEN, quantize
from epcomm.records import SlotIndex
from epcomm.registry import runner_class
from epcomm.runners.ascend.nz import AscendNZRunner
from epcomm.runners.ascend.runner import AscendRunner
from epcomm.testing.data import BatchSpec, holed_ids, make_batch, make_weights
from epcomm.testing.oracle import relative_error
from epcomm.testing.poison import poison_rows, poisoned_memory
from epcomm.types import WeightsAppliedBy
from epcomm.weights.unquantized import ExpertTensors
from fakes.ascend.formats import ACL_FORMAT_ND, ACL_FORMAT_NZ, format_of
from fakes.deep_ep import install
from tests.cases.quantized_model import OF_ASCEND, OF_BFLOAT16, assert_within, expert_model
from tests.fakes.ascend.recorded import golden, tensor_of
from tests.ops.indices import index_of
from tests.runners.records import rows_record

NUM_EXPERTS, HIDDEN, INNER = 3, 64, 64
SPEC = BatchSpec(
    hidden_size=HIDDEN,
    num_local_experts=NUM_EXPERTS,
    top_k=2,
    tokens_of_rank=lambda rank, world_size: 9,
    choose_ids=holed_ids,
    dtype=torch.bfloat16,
)
# Half a unit in the last place of bfloat16, relative.
BF16_ROUNDING = 2.0**-8
NAMES = ("ascend", "ascend_nz", "ascend_swiglu_quant")
W8A8 = (*NAMES, "ascend_swiglu")
PROFILES = {name: Int8Profile.DIV if name == NAMES[2] else Int8Profile.RINT127 for name in W8A8}


@pytest.fixture(autouse=True)
def machine(npu_operators: None) -> Iterator[None]:
    with torch.no_grad():
        yield


def plain_weights(number: int = 0) -> ExpertWeights:
    made = make_weights(SPEC, 1, intermediate_size=INNER, number=number)
    return made.with_tensors({name: each.detach() for name, each in made.tensors().items()})


def int8_weights(number: int = 0) -> Int8ChannelWeights:
    return Int8ChannelWeights.from_unquantized(plain_weights(number))


def make_runner(name: str) -> AscendRunner:
    runner = runner_class(name)(int8_profile=PROFILES[name])
    assert isinstance(runner, AscendRunner)
    return runner


def batch_index(tail: int = 0) -> SlotIndex:
    """Make the index of a batch; tail: slots after those of the last expert."""
    index = index_of(make_batch(SPEC, 0, 1).topk_ids.tolist(), NUM_EXPERTS)
    unused = index.row_of_slot.new_full((tail,), -1)
    return replace(index, row_of_slot=torch.cat([index.row_of_slot, unused]), is_dense=not tail)


def record(
    rows: WireTensor, index: SlotIndex, slot_weights: Tensor | None = None
) -> RowsDispatchOutput:
    by_combine = slot_weights is None
    who = WeightsAppliedBy.COMBINE if by_combine else WeightsAppliedBy.RUNNER
    return rows_record(rows, index, slot_weights, who)


def plain_record(index: SlotIndex, slot_weights: Tensor | None = None) -> RowsDispatchOutput:
    """Make an unquantised record; rows without a slot are NaN."""
    rows = poison_rows(make_batch(SPEC, 0, 1).x, index.slots_of_row.ge(0).any(1))
    wire = WireTensor(data=rows, format=WireFormat.of(torch.bfloat16))
    return record(wire, index, slot_weights)


def experts_of_slots(index: SlotIndex) -> list[int]:
    return [e for e, n in enumerate(index.num_tokens_per_expert.tolist()) for _ in range(n)]


@pytest.mark.parametrize(("name", "is_quantized"), list(product(W8A8, [True, False])))
def test_w8a8_experts_equal_a_float64_model(name: str, is_quantized: bool) -> None:
    """Check results against a float64 model, within its rounding uncertainty in bfloat16."""
    index, weights = batch_index(tail=4), int8_weights()
    x = make_batch(SPEC, 0, 1).x
    wire = quantize(x, INT8_PER_TOKEN, profile=PROFILES[name])
    with poisoned_memory():
        sent = record(wire, index) if is_quantized else plain_record(index)
        results = make_runner(name).run(sent, weights).hidden_states
    assert results.dtype == torch.bfloat16
    rounding = OF_BFLOAT16 if name == "ascend_swiglu" else OF_ASCEND
    for slot, expert in enumerate(experts_of_slots(index)):
        row = int(index.row_of_slot[slot])
        expected = expert_model(x[row : row + 1].double(), weights, expert, rounding)
        assert_within(results[slot : slot + 1], expected)


def bf16_model(x: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    """Return one expert's [N, H] in float64, rounded where the operators store bfloat16."""
    gate_up = weights.gate_up_proj[expert].double()
    gate, up = (x.double() @ gate_up.T).bfloat16().double().chunk(2, dim=1)
    hidden = (gate / (1 + torch.exp(-gate)) * up).bfloat16().double()
    return hidden @ weights.down_proj[expert].double().T


@pytest.mark.parametrize("name", NAMES[:2])
def test_bf16_experts_equal_a_float64_model(name: str) -> None:
    index, weights = batch_index(tail=4), plain_weights()
    experts = experts_of_slots(index)
    slot_weights = torch.linspace(0.5, 2.0, len(experts) + 4)
    x = make_batch(SPEC, 0, 1).x
    with poisoned_memory():
        results = make_runner(name).run(plain_record(index, slot_weights), weights).hidden_states
    expected = torch.cat(
        [
            slot_weights[slot].double()
            * bf16_model(x[int(index.row_of_slot[slot])][None], weights, expert)
            for slot, expert in enumerate(experts)
        ]
    )
    # The last product and the weighting round once each; a float32 sum that falls to the other
    # side of a middle between two bfloat16 moves a few activations by as much.
    assert relative_error(results[: len(experts)], expected) <= 2 * BF16_ROUNDING


Spy = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    def follow(operator: str) -> list[tuple[Any, ...]]:
        calls, original = [], getattr(torch.ops.npu, operator)

        def called(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            # A mode for torch functions, such as LibraryDefaults, calls this function once more.
            if torch._C._len_torch_function_stack() == 0:
                calls.append(args)
            return original(*args, **options)

        monkeypatch.setattr(torch.ops.npu, operator, called)
        return calls

    return follow


@pytest.mark.parametrize("make", [plain_weights, int8_weights])
@pytest.mark.parametrize(
    ("name", "layout"), [("ascend", ACL_FORMAT_ND), ("ascend_nz", ACL_FORMAT_NZ)]
)
def test_nz_reaches_the_products_where_it_is_asked_for(
    name: str, layout: int, make: Callable[[], ExpertTensors], spy: Spy
) -> None:
    calls = spy("npu_grouped_matmul")
    make_runner(name).run(plain_record(batch_index()), make())
    assert [format_of(matrices[0]) for _, matrices in calls] == [layout, layout]


def test_the_first_product_of_two_operators_is_one_of_them(spy: Spy) -> None:
    fused, grouped = spy("npu_grouped_matmul_swiglu_quant"), spy("npu_grouped_matmul")
    make_runner("ascend_swiglu_quant").run(plain_record(batch_index()), int8_weights())
    assert [format_of(args[1]) for args in fused] == [ACL_FORMAT_NZ]
    assert [format_of(args[1][0]) for args in grouped] == [ACL_FORMAT_NZ]


@pytest.mark.parametrize(
    ("name", "operator"),
    [("ascend", "npu_grouped_matmul"), ("ascend_swiglu_quant", "npu_grouped_matmul_swiglu_quant")],
)
def test_rows_become_codes_as_the_runner_computes(name: str, operator: str, spy: Spy) -> None:
    """Use rows whose codes differ between the two arithmetics."""
    profiles, index = golden("ascend_quant_profiles"), batch_index()
    rows = tensor_of(profiles["x"])[[5, 6, 8]].repeat(3, HIDDEN // 16)
    calls = spy(operator)
    wire = WireTensor(data=rows, format=WireFormat.of(torch.bfloat16))
    make_runner(name).run(record(wire, index), int8_weights())
    profile = "div" if name == "ascend_swiglu_quant" else "rint127"
    recorded = tensor_of(profiles["profiles"][profile]["codes"])[[5, 6, 8]]
    codes = calls[0][0] if name == "ascend_swiglu_quant" else calls[0][0][0]
    assert torch.equal(codes, recorded.repeat(3, HIDDEN // 16)[index.row_of_slot])


def write_in_place(tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(new[name])


def replace_tensors(tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    tensors.update(new)


def point_elsewhere(tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.data = new[name]


@pytest.mark.parametrize("load", [write_in_place, replace_tensors, point_elsewhere])
@pytest.mark.parametrize("name", NAMES[1:])
def test_copies_are_made_once_and_again_after_a_reload(
    name: str, load: Callable[[dict[str, Tensor], dict[str, Tensor]], None], spy: Spy
) -> None:
    casts, runner, sent = spy("npu_format_cast"), make_runner(name), plain_record(batch_index())
    kind, other = int8_weights(), int8_weights(number=1)
    tensors = dict(kind.tensors())

    def run() -> Tensor:
        # Like ExpertParallelExperts, with a new record of the parameters for each call.
        return runner.run(sent, kind.with_tensors(tensors)).hidden_states

    first = run()
    assert torch.equal(run(), first)
    assert len(casts) == 2
    load(tensors, {key: tensor.clone() for key, tensor in other.tensors().items()})
    expected = make_runner(name).run(sent, other).hidden_states
    del casts[:]
    assert not torch.equal(first, expected)
    assert torch.equal(run(), expected)
    assert len(casts) == 2
    tensors["down_proj"].zero_()
    assert not run().any()
    assert len(casts) == 3


def test_another_tensor_at_the_old_address_is_seen() -> None:
    """Imitate memory that was freed and allocated again, where only the object has changed."""
    runner, sent, weights = AscendNZRunner(), plain_record(batch_index()), int8_weights()
    memory = weights.down_proj.numpy()
    before, after = (
        weights.with_tensors(weights.tensors() | {"down_proj": torch.from_numpy(memory)})
        for _ in range(2)
    )
    assert runner.run(sent, before).hidden_states.any()
    memory[:] = 0
    assert not runner.run(sent, after).hidden_states.any()


def test_tensors_that_count_no_writes_are_refused() -> None:
    with torch.inference_mode():
        weights = int8_weights()
    sent = plain_record(batch_index())
    AscendRunner().run(sent, weights)
    with pytest.raises(ConfigError, match=r"ascend_nz: gate_up_proj was made in inference mode"):
        AscendNZRunner().run(sent, weights)


def zeros(hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    return ExpertWeights(
        gate_up_proj=torch.zeros(1, 2 * inner, hidden, dtype=dtype),
        down_proj=torch.zeros(1, hidden, inner, dtype=dtype),
    )


def int8_zeros(hidden: int, inner: int) -> Int8ChannelWeights:
    return Int8ChannelWeights.from_unquantized(zeros(hidden, inner))


SUMS_OUT_OF_BLOCKS = (
    "2 * intermediate_size is 96, expected a multiple of 64 of at most 10496 for "
    "npu_dequant_swiglu_quant"
)
RELU2 = ExpertFormat(activation=Activation.RELU2)
BIASED = replace(zeros(64, 48), down_bias=torch.zeros(1, 64).bfloat16())
SQUARED = replace(zeros(64, 48), gate_up_proj=torch.zeros(1, 48, 64).bfloat16(), format=RELU2)
SUPPORTS: dict[str, tuple[ExpertTensors, tuple[str, ...], tuple[str, ...]]] = {
    "bf16": (zeros(64, 48), NAMES[:2], ()),
    "widest sums": (int8_zeros(64, 5248), NAMES[:2], ()),
    "widest of one operator": (int8_zeros(64, 5120), NAMES[2:], ()),
    "sums out of blocks": (int8_zeros(64, 48), NAMES[:2], (SUMS_OUT_OF_BLOCKS,)),
    "int8 out of tiles": (
        int8_zeros(40, 32),
        NAMES[1:],
        (
            "gate_up_proj has K = 40, expected a multiple of 16 in NZ",
            "down_proj has N = 40, expected a multiple of 32 for torch.int8 in NZ",
        ),
    ),
    "float32": (
        zeros(8, 8, torch.float32),
        NAMES[:1],
        ("hidden states are torch.float32, expected bfloat16",),
    ),
    "biases": (
        BIASED,
        NAMES[:2],
        (f"computes {ExpertFormat()} without biases, not {ExpertFormat()} with biases",),
    ),
    "another activation": (
        SQUARED,
        NAMES[:2],
        (f"computes {ExpertFormat()} without biases, not {RELU2}",),
    ),
    "sums beyond int32": (
        int8_zeros(131072, 32),
        NAMES,
        ("hidden_size is 131072, expected at most 131071, beyond which sums overflow int32",),
    ),
}


@pytest.mark.parametrize("case", SUPPORTS)
def test_supports_says_what_the_operators_refuse(case: str) -> None:
    weights, names, reasons = SUPPORTS[case]
    for name in names:
        verdict = runner_class(name).supports(weights)
        assert verdict.reasons == reasons
        assert verdict.ok == (not reasons)


def test_the_operators_of_these_experts_must_be_there() -> None:
    meta = zeros(64, 48)
    meta = meta.with_tensors({name: each.to("meta") for name, each in meta.tensors().items()})
    missing = "npu_grouped_matmul, npu_swiglu, npu_format_cast not on meta; import torch_npu"
    assert AscendNZRunner.supports(meta).reasons == (missing,)


def test_copies_are_made_for_nobody_who_has_not_asked() -> None:
    experts = int8_zeros(64, 48)
    assert not [name for name in NAMES if runner_class(name).is_candidate(experts)]
    # Such a device cannot be named without torch_npu.
    vars(experts)["gate_up_proj"] = SimpleNamespace(device=SimpleNamespace(type="npu"))
    assert [name for name in NAMES if runner_class(name).is_candidate(experts)] == ["ascend"]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_operators_cannot_do_is_refused(name: str) -> None:
    index, weights, runner = batch_index(), int8_weights(), make_runner(name)
    sent = plain_record(index)
    with pytest.raises(
        ShapeError, match=f"{name}: slots begin at multiples of 8, .* for runner {name}$"
    ):
        runner.run(replace(sent, index=replace(index, expert_alignment=8)), weights)
    rows = sent.hidden_states.data
    narrow = replace(sent.hidden_states, data=rows[:, :32])
    with pytest.raises(ShapeError, match=f"{name}: rows are .* so H is 32, expected 64"):
        runner.run(replace(sent, hidden_states=narrow), weights)
    masked = MaskedDispatchOutput(
        hidden_states=sent.hidden_states,
        num_tokens_per_expert=index.num_tokens_per_expert,
        slot_weights=None,
        weights_applied_by=WeightsAppliedBy.COMBINE,
        handle=sent.handle,
    )
    with pytest.raises(ShapeError, match=f"{name}: the record has the MASKED layout"):
        runner.run(masked, weights)
    trained = replace(sent.hidden_states, data=rows.clone().requires_grad_())
    with torch.enable_grad(), pytest.raises(ConfigError, match=f"{name}: rows need gradients"):
        runner.run(replace(sent, hidden_states=trained), weights)


def test_experts_that_need_gradients_are_refused() -> None:
    weights = make_weights(SPEC, 1, intermediate_size=INNER)
    sent = plain_record(batch_index())
    with torch.enable_grad(), pytest.raises(ConfigError, match="ascend: experts need gradients"):
        AscendRunner().run(sent, weights)
    AscendRunner().run(sent, weights)


LARGE = MoESpec(hidden_size=1024, num_experts=2, top_k=1)


@pytest.mark.parametrize(
    ("mode", "made"), [("normal", "rint127, rint127eps"), ("low_latency", "rint127")]
)
def test_a_package_that_makes_int8_rows_in_its_own_way_is_no_help(
    mode: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "2000")
    config = EPConfig(
        mode=mode,
        max_tokens_per_rank=None if mode == "normal" else 16,
        backend="ascend",
        runner="ascend_swiglu_quant",
        int8_profile="div",
    )
    weights = int8_zeros(1024, 32)
    with install("ascend"):
        wanted = f"makes INT8 rows by {made}, but EPConfig.int8_profile is div"
        with pytest.raises(BackendUnavailable, match=wanted):
            plan(config, LARGE, world_size=2, weights=weights)
        # Rows that are sent in bfloat16 become codes in the runner.
        unquantised = replace(config, dispatch_dtype=WireDtype.BF16)
        chosen = plan(unquantised, LARGE, world_size=2, weights=weights)
        assert chosen.runner == "ascend_swiglu_quant"
