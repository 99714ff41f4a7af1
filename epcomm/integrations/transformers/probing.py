"""Check, by a run on a few random tokens, that a block computes what its names suggest.

Names do not show whether a softmax runs before or after top-k, or where a block multiplies by its
scale; only code does. So a reading of names is always verified: a copy of the block and the layer
that was read from it must agree, in outputs and in all gradients, in training and in evaluation.

The copy has random float32 values on the CPU, because zeros would hide a correction bias, and a
block on the meta device has no values. Experts and shared experts are replaced by cheap functions;
experts_disagreement() runs the experts separately, on small matrices. A probe is local, reads no
weight and takes 20 ms of a CPU for a small block, 0.7 s for a block of DeepSeek-V3.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from epcomm.blocks import BlockLayout, RouterInput, correction_bias_of
from epcomm.config import EPConfig, Router
from epcomm.errors import EPError
from epcomm.experts import ExpertParallelExperts
from epcomm.integrations.transformers.structure import parts_of, refusal
from epcomm.moe import ExpertParallelMoE
from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec
from epcomm.runners.reference import run_expert
from epcomm.weights.unquantized import ExpertWeights

# A probe runs _NUM_TOKENS tokens with logits of order one, and _NUM_LOW_TOKENS tokens for each of
# _LOW_LOGITS with all logits near that value: there a sigmoid is as small as the epsilons of
# renormalisation, 1e-6 and 1e-20.
_NUM_TOKENS = 16
_LOW_LOGITS, _NUM_LOW_TOKENS = (-14.0, -46.0), 4
# 1024 roundings of float32, each 2**-24 of a value: in the gradient of a token whose logits are all
# low, terms about a hundred times as large as the result cancel. A wrong step is off by 1e-3 and
# more.
_TOLERANCE = 1024 * 2.0**-24
# Number of tokens, H and I of the trial of experts; all of them are tried, on small matrices.
_NUM_TRIED, _HIDDEN, _INTERMEDIATE = 16, 8, 6
# 128 roundings of float32, for two sums of products and an activation. A limit of 10 on the wrong
# side of silu is off by 4e-5.
_EXPERTS_TOLERANCE = 128 * 2.0**-24


class BlockProbe:
    """A copy of a block, with random values and without its large parts."""

    def __init__(self, block: nn.Module, layout: BlockLayout, num_experts: int) -> None:
        """Copy the block; `layout` is the layout that its names propose. Local."""
        self._kind = type(block).__name__
        self._layout = layout
        self._num_experts = num_experts
        self._generator = torch.Generator().manual_seed(0)
        with on_cpu():
            slopes = torch.rand(num_experts, generator=self._generator, dtype=torch.float32)
            self._slopes = slopes + 0.5
            large: dict[str, nn.Module] = {"experts": _StubOfBlock(self._slopes)}
            if layout.shared_experts is not None:
                large[layout.shared_experts] = _StubOfShared(self._kind, layout.shared_experts)
            self._block = copy_with(block, large)

    def trace(self) -> tuple[BlockLayout, int]:
        """Run the block once; return the layout with the observed router inputs, and K.

        Raises:
            ConfigError: the block cannot be run on tokens alone, gives its router other inputs, or
                returns other results than ExpertParallelMoE can.
        """
        calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
        router = self._block.get_submodule(self._layout.router)
        handle = router.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        with on_cpu():
            x, input_ids = self._inputs(is_negative=False)
            outputs = self._run(x, input_ids)
        handle.remove()
        stub = cast(_StubOfBlock, self._block.get_submodule("experts"))
        if len(calls) != 1 or stub.topk_ids is None:
            raise refusal(f"{self._kind} called its router {len(calls)} times", "one call")
        return replace(
            self._layout,
            router_inputs=self._router_inputs(calls[0], input_ids),
            returns_scores=self._returns_scores(outputs, stub.topk_ids),
        ), stub.topk_ids.shape[-1]

    def disagreement(self, layout: BlockLayout, routing: RoutingSpec) -> str | None:
        """Return how the block and a layer of this layout and routing disagree, or None."""
        experts = cast(ExpertParallelExperts, _StubOfLayer(self._slopes, routing.top_k))
        with on_cpu():
            try:
                layer = ExpertParallelMoE(
                    routing=routing, experts=experts, parts=parts_of(self._block), layout=layout
                )
                for is_training in (True, False):
                    # Biases have both signs: some models give dropped groups a score of 0, which is
                    # above a negative bias.
                    x, input_ids = self._inputs(is_negative=is_training)
                    self._block.train(is_training)
                    found = self._compare(layer, x, input_ids)
                    if found is not None:
                        return found
            except EPError as error:
                return str(error)
        return None

    def _compare(self, layer: nn.Module, x: Tensor, input_ids: Tensor) -> str | None:
        tensors = {"x": x} | {n: p for n, p in self._block.named_parameters() if p.requires_grad}

        def outcome(call: Callable[[], tuple[Tensor, ...]]) -> dict[str, Tensor | None]:
            torch.manual_seed(0)  # For routers that draw experts at random in training.
            outputs = call()
            factors = [
                torch.linspace(-1, 1, each.numel(), dtype=torch.float32).view(each.shape)
                for each in outputs
            ]
            total = sum(((o * f).sum() for o, f in zip(outputs, factors, strict=True)), x.sum())
            grads = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
            named = {f"output {place}": each for place, each in enumerate(outputs)}
            found: dict[str, Tensor | None] = dict(named)
            return found | {f"the gradient of {n}": g for n, g in zip(tensors, grads, strict=True)}

        wanted = outcome(lambda: self._run(x, input_ids))
        found = outcome(lambda: _as_tuple(layer(x, input_ids)))
        if wanted.keys() != found.keys():
            return f"it returns {len(wanted) - len(tensors)} tensors"
        for name, each in wanted.items():
            error = row_error(found[name], each)
            if not error <= _TOLERANCE:
                return f"{name} differs by {error:.1g} of its largest value"
        return None

    def _run(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        takes_ids = "input_ids" in inspect.signature(type(self._block).forward).parameters
        arguments = {"input_ids": input_ids} if takes_ids else {}
        try:
            # The block gets a copy, because some blocks change their input.
            outputs = _as_tuple(self._block(x.clone(), **arguments))
        except EPError:
            raise
        except Exception as error:
            raise refusal(
                f"{self._kind} cannot be run on a few random tokens: "
                f"{type(error).__name__}: {error}",
                "a block that takes hidden states alone",
            ) from error
        if not all(isinstance(each, Tensor) and each.is_floating_point() for each in outputs):
            kinds = [type(each).__name__ for each in outputs]
            raise refusal(f"{self._kind} returns {kinds}", "y, or y and the weights of experts")
        return outputs

    def _inputs(self, *, is_negative: bool) -> tuple[Tensor, Tensor]:
        """Fill the copy again, and return a batch [2, T / 2, H] with its token ids."""
        generator = self._generator
        with torch.no_grad():
            fill(self._block, generator, self._num_experts)
            bias = correction_bias_of(self._block, self._layout)
            if bias is not None:
                bias.copy_(torch.rand(bias.shape, generator=generator, dtype=torch.float32) / 4)
                bias.add_(-2.0 if is_negative else 0.05)
        router = self._block.get_submodule(self._layout.router)
        matrices = [each for each in router.parameters() if each.dim() == 2]
        if not matrices:
            raise refusal(f"the router of {self._kind} has no matrix", "one of [E, H]")
        hidden_size = matrices[0].shape[1]
        shape = (_NUM_TOKENS, hidden_size)
        ordinary = 8 * torch.randn(shape, generator=generator, dtype=torch.float32)
        low = [ordinary.new_full((_NUM_LOW_TOKENS, hidden_size), -each) for each in _LOW_LOGITS]
        x = torch.cat([ordinary, *low])
        x = x[torch.randperm(x.shape[0], generator=generator)]
        num_ids = min((len(each) for each in router.buffers() if is_table(each)), default=2)
        input_ids = torch.randint(0, num_ids, (2, x.shape[0] // 2), generator=generator)
        return x.view(2, -1, hidden_size).requires_grad_(), input_ids

    def _router_inputs(
        self, call: tuple[tuple[object, ...], dict[str, object]], input_ids: Tensor
    ) -> tuple[RouterInput, ...]:
        args, kwargs = call
        tokens = args[0] if args else None
        if kwargs or not isinstance(tokens, Tensor):
            raise refusal(f"{self._kind} calls its router with {sorted(kwargs)}", "tokens first")
        found = [RouterInput.TOKENS if tokens.dim() == 2 else RouterInput.BATCH]
        bias = correction_bias_of(self._block, self._layout)
        for place, each in enumerate(args[1:], 2):
            if each is bias:
                found.append(RouterInput.CORRECTION_BIAS)
            elif each is input_ids:
                found.append(RouterInput.INPUT_IDS)
            else:
                raise refusal(
                    f"{self._kind} calls its router with a {type(each).__name__} as argument "
                    f"{place}",
                    "its correction bias or input_ids",
                )
        return tuple(found)

    def _returns_scores(self, outputs: tuple[Tensor, ...], topk_ids: Tensor) -> bool:
        if len(outputs) == 1:
            return False
        if len(outputs) == 2 and outputs[1].shape == topk_ids.shape:
            return True
        shapes = [list(each.shape) for each in outputs]
        raise refusal(
            f"{self._kind} returns {len(outputs)} tensors of {shapes}",
            "y, or y and the weights [T, K] of the experts",
        )


class _StubOfBlock(nn.Module):
    """Replaces the experts of a block: each multiplies its tokens by another number."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes
        self.topk_ids: Tensor | None = None

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self.topk_ids = topk_ids
        return hidden * (self.slopes[topk_ids] * topk_weights).sum(-1, keepdim=True)


class _StubOfLayer(nn.Module):
    """Replaces the experts of an ExpertParallelMoE, and multiplies as _StubOfBlock does."""

    def __init__(self, slopes: Tensor, top_k: int) -> None:
        super().__init__()
        self.slopes = slopes
        self.num_logical_experts, self.top_k = len(slopes), top_k
        self.hidden_size = self.replica_table = None  # any size works: experts are not placed
        self.config = EPConfig(router=Router.REFERENCE)
        self.group = SimpleNamespace(device=torch.device("cpu"), where="in a probe", calls=None)

    def forward(self, hidden: Tensor, topk: TopKOutput, **_: object) -> Tensor:
        return hidden * (self.slopes[topk.topk_ids] * topk.topk_weights).sum(-1, keepdim=True)


class _StubOfShared(nn.Module):
    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self._what = f"{kind} calls {name}"

    def forward(self, x: Tensor, *others: object, **further: object) -> Tensor:
        if others or further:
            names = sorted(further) or [type(each).__name__ for each in others]
            raise refusal(f"{self._what} with {names} in addition to the tokens", "tokens alone")
        return x.flip(-1) * 0.7


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Compute in float32 with gradients on the CPU, whatever the caller's contexts ask for."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def copy_with(block: nn.Module, large: Mapping[str, nn.Module]) -> nn.Module:
    """Copy the block with other modules of these names, and with new tensors."""
    memo = memo_of_configs(block)
    memo |= {id(block.get_submodule(name)): module for name, module in large.items()}
    for name, module in block.named_modules():
        if name.partition(".")[0] in large:
            continue
        for tensor in module.parameters(recurse=False):
            values = torch.zeros(tensor.shape, dtype=torch.float32)
            memo[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad)
        for tensor in module.buffers(recurse=False):
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            memo[id(tensor)] = torch.zeros(tensor.shape, dtype=dtype)
    return copy.deepcopy(block, memo)


def memo_of_configs(module: nn.Module) -> dict[int, object]:
    """Return the memo of a deepcopy() that shares the configurations in a module."""
    found = (vars(each).get("config") for each in module.modules())
    return {id(config): config for config in found if config is not None}


def fill(block: nn.Module, generator: torch.Generator, num_experts: int) -> None:
    """Fill in random values; rows of matrices sum to about -1, so that ones give that logit."""
    for tensor in (*block.parameters(), *block.buffers()):
        if is_table(tensor):
            num_rows, width = tensor.shape
            keys = torch.rand(num_rows, num_experts, generator=generator, dtype=torch.float32)
            tensor.copy_(keys.argsort(dim=1)[:, :width])
        elif tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32) / 10
            if tensor.dim() == 2 and tensor.shape[1] > 1:
                values = values / tensor.shape[1] ** 0.5 - 1 / tensor.shape[1]
            tensor.copy_(values)


def is_table(tensor: Tensor) -> bool:
    """Return whether a tensor of a router holds the experts of each token id."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


def row_error(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return the largest difference relative to its row's largest value; inf if one is None."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    if found.shape != wanted.shape:
        return float("inf")
    rows = [t.detach().reshape(-1, t.shape[-1] if t.dim() else 1) for t in (found, wanted)]
    scale = rows[1].abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((rows[0] - rows[1]).abs().amax(dim=1) / scale).max())


def experts_disagreement(experts: nn.Module, weights: ExpertWeights) -> str | None:
    """Return how the experts and `weights`, which were read from them, disagree, or None.

    The trial runs on small matrices with the experts' names, orientation and settings.
    """
    generator = torch.Generator().manual_seed(0)
    names = {id(tensor): field for field, tensor in weights.tensors().items()}
    limit = weights.format.limit or 1.0
    with on_cpu():
        small = _small_weights(weights, generator)
        memo = memo_of_configs(experts)
        for tensor in experts.parameters():
            memo[id(tensor)] = nn.Parameter(small.tensors()[names[id(tensor)]])
        clone = copy.deepcopy(experts, memo)
        ids = torch.randperm(small.num_experts, generator=generator)[:2].repeat(_NUM_TRIED, 1)
        ids[1::2] = ids[1::2].flip(1)
        factors = torch.rand(ids.shape, generator=generator, dtype=torch.float32)
        # Inputs this large put gates and ups on both sides of the limit.
        x = limit * torch.randn(_NUM_TRIED, _HIDDEN, generator=generator, dtype=torch.float32)
        # The trial calls the plain function, whatever kernels the configuration asks for.
        forward = inspect.unwrap(type(clone).forward)
        with torch.no_grad():
            try:
                found = forward(clone, x, ids, factors)
            except Exception as error:  # noqa: BLE001  whatever it is, the block is refused
                return f"they cannot be run on a few tokens: {type(error).__name__}: {error}"
            error = row_error(_computed(small, x, ids, factors), found)
    return None if error <= _EXPERTS_TOLERANCE else f"y differs by {error:.1g} of its largest value"


def _small_weights(weights: ExpertWeights, generator: torch.Generator) -> ExpertWeights:
    num_experts, is_transposed = weights.num_experts, weights.format.is_transposed
    first = _INTERMEDIATE * (2 if weights.format.activation.is_gated else 1)
    shapes = {
        "gate_up_proj": (_HIDDEN, first) if is_transposed else (first, _HIDDEN),
        "down_proj": (_INTERMEDIATE, _HIDDEN) if is_transposed else (_HIDDEN, _INTERMEDIATE),
        "gate_up_bias": (first,),
        "down_bias": (_HIDDEN,),
    }
    sizes = {field: (num_experts, *shapes[field]) for field in weights.tensors()}
    draw = partial(torch.randn, generator=generator, dtype=torch.float32)
    return weights.with_tensors({field: draw(size) for field, size in sizes.items()})


def _computed(weights: ExpertWeights, x: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """Compute the experts of each token one after the other, [T, H]."""
    y = torch.zeros_like(x)
    for token, place in torch.cartesian_prod(*(torch.arange(size) for size in ids.shape)).tolist():
        result = run_expert(x[token], None, weights, int(ids[token, place]))
        y[token] += factors[token, place] * result
    return y
