from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    Activation,
    ConfigError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertFormat,
    ExpertParallelExperts,
    ExpertWeights,
    Fp8BlockWeights,
    Mode,
    MoESpec,
    ScaleDtype,
    TopKOutput,
    plan,
)
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.shared_memory.buffer import SharedMemoryBuffer
from epcomm.errors import PlanRefused
from epcomm.ops.slots import gather_rows
from epcomm.planning import candidates
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.spec import Availability, HostLayout

NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


def weights() -> ExpertWeights:
    return ExpertWeights(
        gate_up_proj=torch.empty(8, 32, 16, device="meta"),
        down_proj=torch.empty(8, 16, 16, device="meta"),
    )


def lacking(*reasons: str) -> Availability:
    return Availability(ok=not reasons, reasons=reasons)


def test_backend_that_a_rank_lacks_is_rejected_on_all(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    """A reason that holds on all ranks names none of them."""
    reasons = ("no cable", "no driver") if group.rank == 1 else ()
    for found, named in ((reasons, "rank 1: no cable"), (("no cable",), "no cable")):
        for kind in (CollectiveBuffer, SharedMemoryBuffer):
            monkeypatch.setattr(kind, "probe", lambda machine, found=found: lacking(*found))
        with pytest.raises(ConfigError) as caught:
            plan(EPConfig(mode="normal"), SPEC, group)
        assert f"shared_memory, collective: {named}" in str(caught.value)
        assert ("shared_memory, collective: rank 1: no driver" in str(caught.value)) == (
            found is reasons
        )


def test_a_plan_and_its_buffer_take_one_exchange_each(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    with EPGroup() as group:
        gather = group.collectives.all_gather

        def counted(tensor: Tensor, *, phase: str) -> Tensor:
            phases.append(phase)
            return gather(tensor, phase=phase)

        monkeypatch.setattr(group.collectives, "all_gather", counted)
        config = EPConfig(mode="normal", backend="collective", max_tokens_per_rank=8)
        chosen = plan(config, SPEC, group, weights=weights())
        spec = chosen.prefill.buffer_spec
        group.open_buffer(chosen.prefill.buffer, spec)
        group.open_buffer(chosen.prefill.buffer, replace(spec, max_tokens_per_rank=4))
    # The record follows the header with which every call begins. The first buffer of a group also
    # connects its ranks for calls that are begun, which wait for one another.
    opened = "open_buffer, records"
    connected = ["dividing the ranks", "connecting the ranks"]
    assert phases == ["plan, records", opened, *connected, opened]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("a", "b"), HostLayout(host_of_rank=(0, 1))), (("a", "a"), None), (("a", ""), None)],
    ids=["two", "one", "unknown"],
)
def test_hosts_of_ranks_are_found_where_they_differ(
    names: tuple[str, str],
    expected: HostLayout | None,
    monkeypatch: pytest.MonkeyPatch,
    group: EPGroup,
) -> None:
    monkeypatch.setattr(candidates, "host_of_this_process", lambda: names[group.rank])
    chosen = plan(EPConfig(max_tokens_per_rank=8), SPEC, group)
    assert {phase.buffer_spec.hosts for phase in chosen.phases().values()} == {expected}
    lacks = "hosts have one rank each" if expected else "needs ranks on several hosts"
    assert f"rejected hierarchical: {lacks}" in chosen.explain()
    # All rows go between two hosts with one rank each; plans for one host predict no bytes
    # between hosts.
    per_token = sum(chosen.prefill.max_bytes_per_token().values())
    between = None if expected is None else per_token
    assert chosen.prefill.max_bytes_between_hosts() == between


def test_runner_that_one_rank_lacks_is_rejected_on_all(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    reasons = ("no kernel",) if group.rank == 0 else ()
    monkeypatch.setattr(GroupedMMRunner, "supports", lambda *asked: lacking(*reasons))
    chosen = plan(EPConfig(), SPEC, group, weights=weights())
    assert chosen.runner == "reference"
    assert [str(each) for each in chosen.rejected_runners] == ["grouped_mm: rank 0: no kernel"]


def test_ranks_that_compute_other_bits_cannot_promise_equal_sums(group: EPGroup) -> None:
    config = EPConfig(sum_groups=4)
    chosen = plan(config, SPEC, group, weights=weights())
    assert chosen.runner == "batch_invariant"
    threads = torch.get_num_threads()
    torch.set_num_threads(group.rank + 1)
    try:
        with pytest.raises(PlanRefused) as caught:
            plan(config, SPEC, group, weights=weights())
    finally:
        torch.set_num_threads(threads)
    assert "batch_invariant: sum_groups needs ranks that compute alike" in str(caught.value)
    assert "1 threads on rank 0" in str(caught.value)
    assert "2 threads on rank 1" in str(caught.value)


# A different value for every field, so that a new field cannot be forgotten.
OTHER_CONFIG = {
    "dispatch_dtype": "bf16",
    "dispatch_scales": "float32",
    "combine_dtype": "mxfp8",
    "combine_dtype_with_gradients": True,
    "backward_dtype": "fp8_e4m3",
    "int8_profile": "div",
    "mode": "standard",
    "backend": "collective",
    "runner": "reference",
    "router": "reference",
    "measurements": "nowhere.json",
    "max_tokens_per_rank": 8,
    "max_recv_slots": 40,
    "replicated": True,
    "num_sms": 16,
    "product_sms": 100,
    "batches_in_flight": 3,
    "redundant_experts": 4,
    "timeout_s": 50.0,
    "check_calls": True,
    "deterministic": True,
    "sum_groups": 4,
    "block_tokens": 4,
    "chunks": 2,
    "record_load": True,
}
OTHER_SPEC = {"hidden_size": 32, "num_experts": 12, "top_k": 3, "dtype": torch.bfloat16}


def test_every_field_has_another_value() -> None:
    assert OTHER_CONFIG.keys() == {field.name for field in fields(EPConfig)}
    assert list(OTHER_SPEC) == [field.name for field in fields(MoESpec)]


@pytest.mark.ranks(4)
def test_fields_that_differ_on_one_rank_are_named_on_every_rank(group: EPGroup) -> None:
    for name in (*OTHER_CONFIG, *OTHER_SPEC):
        config, spec = EPConfig(), SPEC
        if group.rank == 2 and name in OTHER_CONFIG:
            config = replace(config, **{name: OTHER_CONFIG[name]})
        elif group.rank == 2:
            spec = replace(spec, **{name: OTHER_SPEC[name]})
        with pytest.raises(ConfigError) as caught:
            plan(config, spec, group)
        assert f"plan: ranks disagree on {name}: " in str(caught.value)
        assert " on ranks 0, 1, 3, " in str(caught.value)
        assert " on rank 2 (this is " in str(caught.value)
    expect_works(group)


def experts_of(intermediate_size: int = 16, top_k: int = 2, **changes: float) -> dict[str, object]:
    """Make arguments of ExpertParallelExperts, without data."""
    values = {"activation": "clamped_swiglu", "alpha": 1.7, "limit": 7.0, **changes}
    return {
        "weights": ExpertWeights(
            gate_up_proj=torch.empty(8, 2 * intermediate_size, 16),
            down_proj=torch.empty(8, 16, intermediate_size),
            format=ExpertFormat(**{**values, "activation": Activation(values["activation"])}),
        ),
        "top_k": top_k,
    }


def fp8_of(scales: ScaleDtype) -> dict[str, object]:
    plain = ExpertWeights(gate_up_proj=torch.ones(8, 32, 16), down_proj=torch.ones(8, 16, 16))
    return {"weights": Fp8BlockWeights.from_unquantized(plain, scales=scales), "top_k": 2}


@pytest.mark.ranks(4)
def test_other_experts_on_one_rank_are_named_on_every_rank(group: EPGroup) -> None:
    for others, on_rank_2, field in (
        (experts_of(), experts_of(alpha=1.2), "format"),
        (experts_of(), experts_of(intermediate_size=24), "intermediate_size"),
        (experts_of(), experts_of(top_k=9), "top_k"),
        (fp8_of(ScaleDtype.FLOAT32), fp8_of(ScaleDtype.POWER_OF_TWO), "wanted rows"),
    ):
        arguments = on_rank_2 if group.rank == 2 else others
        with pytest.raises(ConfigError, match=f"plan: ranks disagree on {field}: ") as caught:
            ExpertParallelExperts(group=group, **arguments)
        assert "rank 2" in str(caught.value) or group.rank == 2
    expect_works(group)


def expect_works(group: EPGroup) -> None:
    """Check one correct batch on the same group, with identity experts of weight 1 / K."""
    dispatcher = DeepEPNormalDispatcher(group, SPEC)
    x = torch.full((3, SPEC.hidden_size), group.rank + 1.0, device=group.device)
    topk_ids = torch.tensor([[0, 7], [3, 4], [6, 1]], device=group.device)
    weights = torch.full(topk_ids.shape, 1 / SPEC.top_k, device=group.device)
    out = dispatcher.dispatch(x, TopKOutput(topk_ids=topk_ids, topk_weights=weights))
    rows = gather_rows(out.hidden_states.data, out.index) * out.slot_weights.unsqueeze(1)
    assert torch.equal(dispatcher.combine(out.combine_input(rows)), x)


def test_error_of_one_rank_is_told_to_all(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    def fail(*_: object) -> candidates.Survey:
        raise ConfigError("plan: a file of this rank is broken")

    with monkeypatch.context() as patch:
        if group.rank == 0:
            patch.setattr(candidates, "judge", fail)
        with pytest.raises(ConfigError) as caught:
            plan(EPConfig(), SPEC, group)
    own = "plan: a file of this rank is broken"
    assert str(caught.value).startswith(own if group.rank == 0 else f"plan: rank 0: {own}")
    # The group is usable, and one exchange serves both phases.
    chosen = plan(EPConfig(max_tokens_per_rank=8), SPEC, group)
    assert (chosen.prefill.mode, chosen.decode.mode) == (Mode.NORMAL, Mode.LOW_LATENCY)
