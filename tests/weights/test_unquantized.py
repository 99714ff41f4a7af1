"""ExpertWeights: sizes are read from either storage order, and misfits are named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from epcomm import Activation, ConfigError, ExpertFormat, ExpertWeights, ShapeError

E, H, I = 6, 8, 4  # noqa: E741 (the letter of the intermediate size)
RELU2 = ExpertFormat(activation=Activation.RELU2)
TRANSPOSED = ExpertFormat(is_transposed=True)


@dataclass(frozen=True, kw_only=True)
class Stored:
    id: str
    format: ExpertFormat
    gate_up_proj: tuple[int, ...]
    down_proj: tuple[int, ...]
    num_columns: int


STORED = [
    Stored(
        id="gate and up",
        format=ExpertFormat(),
        gate_up_proj=(E, 2 * I, H),
        down_proj=(E, H, I),
        num_columns=2 * I,
    ),
    Stored(
        id="transposed",
        format=TRANSPOSED,
        gate_up_proj=(E, H, 2 * I),
        down_proj=(E, I, H),
        num_columns=2 * I,
    ),
    Stored(
        id="no gate",
        format=RELU2,
        gate_up_proj=(E, I, H),
        down_proj=(E, H, I),
        num_columns=I,
    ),
]


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored.id)
def test_sizes_and_matrices_do_not_depend_on_the_storage_order(stored: Stored) -> None:
    weights = ExpertWeights(
        gate_up_proj=torch.randn(stored.gate_up_proj),
        down_proj=torch.randn(stored.down_proj),
        gate_up_bias=torch.randn(E, stored.num_columns),
        down_bias=torch.randn(E, H),
        format=stored.format,
    )
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (E, H, I)
    assert weights.dtype is torch.float32
    for matrices, source, shape in (
        (weights.gate_up_matrices(), weights.gate_up_proj, (E, H, stored.num_columns)),
        (weights.down_matrices(), weights.down_proj, (E, I, H)),
    ):
        assert matrices.shape == shape
        assert matrices.data_ptr() == source.data_ptr(), "a view, not a copy"
        element = source[2, 1, 3] if stored.format.is_transposed else source[2, 3, 1]
        assert matrices[2, 1, 3] == element


def test_requires_grad_if_any_tensor_does() -> None:
    weights = ExpertWeights(gate_up_proj=torch.ones(E, 2 * I, H), down_proj=torch.ones(E, H, I))
    assert not weights.requires_grad
    weights.down_proj.requires_grad_()
    assert weights.requires_grad


@dataclass(frozen=True, kw_only=True)
class Misfit:
    id: str
    changes: dict[str, Tensor]
    message: str
    format: ExpertFormat = ExpertFormat()  # noqa: RUF009 (frozen)


MISFITS = [
    Misfit(
        id="two dimensions",
        changes={"down_proj": torch.ones(H, I)},
        message=r"down_proj is \[8, 4\], expected three dimensions",
    ),
    Misfit(
        id="no up half",
        changes={"gate_up_proj": torch.ones(E, I, H)},
        message=r"gate_up_proj is \[6, 8, 4\] .* expected \[6, 8, 8\]",
    ),
    Misfit(
        id="other number of experts",
        changes={"down_proj": torch.ones(E + 1, H, I)},
        message=r"down_proj is \[7, 4, 8\] .* expected \[6, 4, 8\]",
    ),
    Misfit(
        id="stored the other way",
        changes={},
        format=TRANSPOSED,
        message=r"gate_up_proj is \[6, 8, 8\] .* expected \[6, 4, 16\]",
    ),
    Misfit(
        id="bias of the wrong size",
        changes={"gate_up_bias": torch.ones(E, I)},
        message=r"gate_up_bias is \[6, 4\] .* expected \[6, 8\]",
    ),
    Misfit(
        id="bias for all experts",
        changes={"down_bias": torch.ones(H)},
        message=r"down_bias is \[8\] .* expected \[6, 8\]",
    ),
    Misfit(
        id="mixed dtypes",
        changes={"down_proj": torch.ones(E, H, I, dtype=torch.bfloat16)},
        message="down_proj is torch.bfloat16 on cpu, expected torch.float32 on cpu",
    ),
]


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.id)
def test_misfit_is_named(misfit: Misfit) -> None:
    tensors = {"gate_up_proj": torch.ones(E, 2 * I, H), "down_proj": torch.ones(E, H, I)}
    with pytest.raises(ShapeError, match=f"ExpertWeights: {misfit.message}"):
        ExpertWeights(**{**tensors, **misfit.changes}, format=misfit.format)


@pytest.mark.parametrize(
    ("activation", "alpha", "limit"),
    [
        (Activation.CLAMPED_SWIGLU, None, None),
        (Activation.CLAMPED_SWIGLU, 1.7, None),
        (Activation.LIMITED_SWIGLU, None, None),
        (Activation.LIMITED_SWIGLU, 1.7, 7.0),
        (Activation.SWIGLU, 1.7, 7.0),
        (Activation.SWIGLU, 1.7, None),
        (Activation.RELU2, None, 7.0),
    ],
)
def test_alpha_and_limit_belong_to_the_clamped_activation(
    activation: Activation, alpha: float | None, limit: float | None
) -> None:
    message = "clamped_swiglu needs both, limited_swiglu a limit, others neither"
    with pytest.raises(ConfigError, match=message):
        ExpertFormat(activation=activation, alpha=alpha, limit=limit)
