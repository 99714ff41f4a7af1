from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from epcomm import ConfigError, EPConfig, EPGroup, ExpertParallelMoE, idle_step
from tests.cases.blocks import HIDDEN, qwen3_moe


@dataclass
class _Output:
    hidden: Tensor
    name: str = "output"


OUTPUTS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda y: y,
    "transformers": lambda y: MoeCausalLMOutputWithPast(logits=y),
    "nested": lambda y: {"ids": y.detach().long(), "rest": (None, [_Output(hidden=y)])},
}
NOTHING: dict[str, Callable[[Tensor], object]] = {
    "None": lambda y: None,
    "float": lambda y: float(y.sum()),
    "codes": lambda y: y.detach().long(),
    "detached": lambda y: MoeCausalLMOutputWithPast(logits=y.detach()),
}


@pytest.mark.ranks(2)
def test_idle_step_takes_what_models_return(group: EPGroup) -> None:
    """Rank 1 idles; if its backward failed, that of rank 0 would time out."""
    config = EPConfig(mode="normal", backend="collective", timeout_s=20)
    moe = ExpertParallelMoE.from_transformers(qwen3_moe(), group, config)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(group.rank))

    def run(output: Callable[[Tensor], object]) -> None:
        if group.rank == 0:
            moe(x).sum().backward()
        else:
            idle_step(moe, run_token=lambda: output(moe(x[:1])))

    run(OUTPUTS["tensor"])
    wanted = [parameter.grad for parameter in moe.parameters()]
    for output in [*OUTPUTS.values(), *NOTHING.values()]:
        moe.zero_grad()
        is_refused = group.rank == 1 and output in NOTHING.values()
        with pytest.raises(ConfigError) if is_refused else nullcontext() as refusal:
            run(output)
        for parameter, gradient in zip(moe.parameters(), wanted, strict=True):
            assert torch.equal(parameter.grad, gradient)
        if refusal is not None:
            assert str(refusal.value).startswith("idle_step: run_token returned ")
    # Without backward no rank waits, and the result of run_token does not matter.
    with torch.no_grad():
        if group.rank == 0:
            moe(x)
        else:
            idle_step(moe, run_token=lambda: moe(x[:1]).argmax())
