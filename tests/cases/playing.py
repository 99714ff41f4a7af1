"""The dispatchers, layer and batch of one rank on which tests/cases/bad_calls.py makes mistakes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPError,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    MoESpec,
    RoutingSpec,
    RowsCombineInput,
    RowsDispatchOutput,
    StandardDispatcher,
    TopKOutput,
    WireDtype,
)
from epcomm.dispatchers.checks import NeedGrad
from epcomm.experts import AnyDispatcher
from epcomm.ops.slots import gather_rows
from epcomm.quantization import ROW_ERRORS
from epcomm.testing.data import BatchSpec, make_weights, random_ids
from epcomm.types import WeightsAppliedBy, WireTensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

NUM_RANKS, H, E, K, M = 2, 16, 8, 2, 5
SPEC = MoESpec(hidden_size=H, num_experts=E, top_k=K, dtype=torch.float32)
# The rank with the mistake.
FAULTY = 1
LAYER = BatchSpec(
    tokens_of_rank=lambda rank, size: 1,
    choose_ids=random_ids,
    hidden_size=H,
    num_local_experts=E // NUM_RANKS,
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A backend, given by the dispatcher and the configuration that select it.

    is_static: check() raises its faults.   trains: its tests run with gradients.
    """

    dispatcher: type[AnyDispatcher]
    config: EPConfig
    is_static: bool = False
    trains: bool = True


class BegunDispatcher(DeepEPNormalDispatcher):
    """Makes its calls on the thread of transfers."""

    def dispatch(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        *,
        experts_need_grad: NeedGrad = False,
    ) -> RowsDispatchOutput:
        assert self.is_asynchronous, "CPU ranks over gloo"
        return self.dispatch_async(hidden_states, topk, experts_need_grad=experts_need_grad).wait()

    def combine(self, combine_input: RowsCombineInput) -> Tensor:
        return self.combine_async(combine_input).wait()


COLLECTIVE = EPConfig(max_tokens_per_rank=M, backend="collective")
KINDS = {
    "collective": Kind(dispatcher=DeepEPNormalDispatcher, config=COLLECTIVE),
    "shared_memory": Kind(
        dispatcher=DeepEPNormalDispatcher, config=replace(COLLECTIVE, backend="shared_memory")
    ),
    "begun": Kind(dispatcher=BegunDispatcher, config=COLLECTIVE),
    "budget": Kind(
        dispatcher=DeepEPNormalDispatcher,
        config=replace(COLLECTIVE, max_recv_slots=NUM_RANKS * M * K),
        is_static=True,
    ),
    "low_latency": Kind(
        dispatcher=DeepEPLowLatencyDispatcher, config=COLLECTIVE, is_static=True, trains=False
    ),
    "all_gather": Kind(dispatcher=StandardDispatcher, config=COLLECTIVE),
    "replicated": Kind(dispatcher=StandardDispatcher, config=replace(COLLECTIVE, replicated=True)),
}


def _with_sums(name: str, combine_dtype: WireDtype) -> Kind:
    config = replace(
        KINDS[name].config, combine_dtype=combine_dtype, combine_dtype_with_gradients=True
    )
    return replace(KINDS[name], config=config)


# Each format of sums, on one of the kinds that send it.
SUM_KINDS = {
    "fp8_e4m3": _with_sums("collective", WireDtype.FP8_E4M3),
    "mxfp8": _with_sums("shared_memory", WireDtype.MXFP8),
    "nvfp4": _with_sums("begun", WireDtype.NVFP4),
}

# Two hosts with two ranks each.
ON_HOSTS = replace(KINDS["collective"], config=replace(COLLECTIVE, backend="hierarchical"))


@dataclass(kw_only=True)
class Play:
    """The state of one rank.

    x, topk: a correct batch, of 2 and 3 tokens by rank, or equal on all ranks if replicated.
    block: a whole block, whose parts may be made to fail.
    another: a dispatcher on the buffer of `dispatcher`; wider: a dispatcher for other sizes.
    spent: results that were combined.   elsewhere: results of a batch of another group.
    out: the current batch.
    """

    group: EPGroup
    kind: Kind
    dispatcher: AnyDispatcher
    block: ExpertParallelMoE
    another: AnyDispatcher
    wider: AnyDispatcher
    x: Tensor
    topk: TopKOutput
    spent: RowsCombineInput
    elsewhere: RowsCombineInput
    out: RowsDispatchOutput

    @property
    def is_faulty(self) -> bool:
        return self.group.rank == FAULTY

    @property
    def results(self) -> RowsCombineInput:
        return identity(self.out)

    @property
    def closing(self) -> AnyDispatcher:
        """A dispatcher that the test may close. Collective."""
        return open_dispatcher(self.kind, self.group)

    def begin(self) -> RowsDispatchOutput:
        self.out = self.dispatcher.dispatch(self.x, self.topk)
        return self.out

    def whole_call(self, **changes: object) -> Tensor:
        """Dispatch and combine the correct batch with `changes` of x and topk; return y."""
        arguments: dict[str, Any] = {"x": self.x, "topk": self.topk} | changes
        self.out = self.dispatcher.dispatch(arguments["x"], arguments["topk"])
        return self.dispatcher.combine(self.results)

    def call_of(self, dispatcher: AnyDispatcher) -> Tensor:
        """Make a whole call on one of the dispatchers; see whole_call()."""
        x = self.x.detach().repeat(1, dispatcher._spec.hidden_size // H)
        return dispatcher.combine(identity(dispatcher.dispatch(x, self.topk)))

    def expect_works(self) -> None:
        """Check that a correct batch works, forward and backward."""
        x = self.x.detach().requires_grad_(self.kind.trains)
        y = self.whole_call(x=x)
        self.dispatcher.check()
        sums = self.kind.config.combine_dtype
        weights = self.topk.topk_weights.sum(1, keepdim=True)
        # The error of a rank's sum is a share of the largest element of the sum.
        most = x.detach().abs().amax(1, keepdim=True) * weights * (ROW_ERRORS[sums] if sums else 0)
        assert ((y - expected_y(x, self.topk)).abs() <= most + 1e-5).all()
        if self.kind.trains:
            y.sum().backward()
            torch.testing.assert_close(x.grad, weights.expand(-1, H))


def identity(out: RowsDispatchOutput) -> RowsCombineInput:
    """Return each slot as its row, times its weight if the runner applies weights."""
    rows = gather_rows(out.hidden_states.data, out.index)
    if out.weights_applied_by is WeightsAppliedBy.RUNNER:
        rows = rows * out.slot_weights.unsqueeze(1)
    return out.combine_input(rows)


def expected_y(x: Tensor, topk: TopKOutput) -> Tensor:
    weights = torch.where(topk.topk_ids < 0, 0.0, topk.topk_weights)
    return (x.double() * weights.double().sum(1, keepdim=True)).float()


def open_dispatcher(kind: Kind, group: EPGroup, spec: MoESpec = SPEC) -> AnyDispatcher:
    return kind.dispatcher(group, spec, kind.config)


def open_block(kind: Kind, group: EPGroup) -> ExpertParallelMoE:
    config = replace(kind.config, mode=kind.dispatcher.mode)
    size = group.world_size
    batches = replace(LAYER, num_local_experts=E // size)
    experts = ExpertParallelExperts(make_weights(batches, size), group, config, top_k=K)
    gate = nn.Linear(H, E, bias=False)
    routing = RoutingSpec(top_k=K, custom_function=FirstAndLast())
    return ExpertParallelMoE(routing=routing, experts=experts, parts={"gate": gate})


class FirstAndLast:
    """A routing function that chooses experts of rank 1 and of another rank for all tokens.

    choose() may be made to fail.
    """

    def __call__(self, logits: Tensor, *, top_k: int, **_: Tensor | None) -> TopKOutput:
        assert top_k == K
        return self.choose(logits)

    def choose(self, logits: Tensor) -> TopKOutput:
        ids = torch.tensor([2, E - 1]).repeat(logits.shape[0], 1)
        return TopKOutput(topk_ids=ids, topk_weights=logits[:, :K].sigmoid())


class OwnError(Exception):
    """An error of user code or of torch."""


def fail(*_: object, **__: object) -> NoReturn:
    raise OwnError("no memory")


def error_of(call: Callable[[], object]) -> EPError | OwnError | None:
    try:
        call()
    except (EPError, OwnError) as error:
        return error
    return None


@contextmanager
def playing(
    kind: Kind, ranks: "dist.ProcessGroup | DeviceMesh | MPI.Comm | None" = None
) -> Iterator[Play]:
    """Open a separate group for one kind; `ranks` is what EPGroup takes."""
    with EPGroup(ranks) as group, EPGroup(ranks) as other, torch.set_grad_enabled(kind.trains):
        dispatcher = open_dispatcher(kind, group)
        source = 1 if kind.config.replicated else group.rank
        generator = torch.Generator().manual_seed(source)
        x = torch.randn(2 + source, H, generator=generator).requires_grad_(kind.trains)
        ids = torch.rand(2 + source, E, generator=generator).argsort(1)[:, :K]
        weights = torch.rand(2 + source, K, generator=generator)
        topk = TopKOutput(topk_ids=ids, topk_weights=weights)
        spent = identity(dispatcher.dispatch(x, topk))
        dispatcher.combine(spent)
        yield Play(
            group=group,
            kind=kind,
            dispatcher=dispatcher,
            block=open_block(kind, group),
            another=open_dispatcher(kind, group),
            wider=open_dispatcher(kind, group, replace(SPEC, hidden_size=2 * H, num_experts=2 * E)),
            x=x,
            topk=topk,
            spent=spent,
            elsewhere=identity(open_dispatcher(kind, other).dispatch(x, topk)),
            out=dispatcher.dispatch(x, topk),
        )


class Plays:
    """Keeps the resources of the last test for the next one of the same kind; opening takes 100 ms.

    A parametrised fixture of a module would not do: pytest gives it the scope of a function where
    tests have other parameters too.
    """

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._play: Play | None = None
        self._open = ExitStack()

    @contextmanager
    def on(self, kind: Kind, ranks: "DeviceMesh | None" = None) -> Iterator[Play]:
        """Yield a Play of this kind, in its grad mode. Collective if the kind changes."""
        if self._play is None or self._kind is not kind:
            self._open.close()
            with torch.enable_grad():
                self._play, self._kind = self._open.enter_context(playing(kind, ranks)), kind
        with torch.set_grad_enabled(kind.trains):
            yield self._play

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()
