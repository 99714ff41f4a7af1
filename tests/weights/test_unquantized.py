import pytest
import torch
from torch import Tensor

from epcomm import Activation, ConfigError, ExpertFormat, ExpertWeights, ShapeError

E, H, I = 6, 8, 4  # noqa: E741 (the letter of the intermediate size)
RELU2 = ExpertFormat(activation=Activation.RELU2)
TRANSPOSED = ExpertFormat(is_transposed=True)


@pytest.mark.parametrize(
    ("expert_format", "gate_up_proj", "down_proj", "num_columns"),
    [
        (ExpertFormat(), (E, 2 * I, H), (E, H, I), 2 * I),
        (TRANSPOSED, (E, H, 2 * I), (E, I, H), 2 * I),
        (RELU2, (E, I, H), (E, H, I), I),
    ],
    ids=["gate and up", "transposed", "no gate"],
)
def test_sizes_and_matrices_do_not_depend_on_the_storage_order(
    expert_format: ExpertFormat,
    gate_up_proj: tuple[int, ...],
    down_proj: tuple[int, ...],
    num_columns: int,
) -> None:
    weights = ExpertWeights(
        gate_up_proj=torch.randn(gate_up_proj),
        down_proj=torch.randn(down_proj),
        gate_up_bias=torch.randn(E, num_columns),
        down_bias=torch.randn(E, H),
        format=expert_format,
    )
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (E, H, I)
    assert weights.dtype is torch.float32
    for matrices, source, shape in (
        (weights.gate_up_matrices(), weights.gate_up_proj, (E, H, num_columns)),
        (weights.down_matrices(), weights.down_proj, (E, I, H)),
    ):
        assert matrices.shape == shape
        assert matrices.data_ptr() == source.data_ptr(), "a view, not a copy"
        element = source[2, 1, 3] if expert_format.is_transposed else source[2, 3, 1]
        assert matrices[2, 1, 3] == element


def test_requires_grad_if_any_tensor_does() -> None:
    weights = ExpertWeights(gate_up_proj=torch.ones(E, 2 * I, H), down_proj=torch.ones(E, H, I))
    assert not weights.requires_grad
    weights.down_proj.requires_grad_()
    assert weights.requires_grad


MISFITS: list[tuple[str, Tensor, str]] = [
    ("down_proj", torch.ones(H, I), r"is \[8, 4\], expected three dimensions"),
    ("gate_up_proj", torch.ones(E, I, H), r"is \[6, 8, 4\] .* expected \[6, 8, 8\]"),
    ("down_proj", torch.ones(E + 1, H, I), r"is \[7, 4, 8\] .* expected \[6, 4, 8\]"),
    ("gate_up_bias", torch.ones(E, I), r"is \[6, 4\] .* expected \[6, 8\]"),
    ("down_bias", torch.ones(H), r"is \[8\] .* expected \[6, 8\]"),
    (
        "down_proj",
        torch.ones(E, H, I, dtype=torch.bfloat16),
        "is torch.bfloat16 on cpu, expected torch.float32 on cpu",
    ),
]


@pytest.mark.parametrize(("name", "tensor", "message"), MISFITS)
def test_misfit_is_named(name: str, tensor: Tensor, message: str) -> None:
    tensors = {"gate_up_proj": torch.ones(E, 2 * I, H), "down_proj": torch.ones(E, H, I)}
    with pytest.raises(ShapeError, match=f"ExpertWeights: {name} {message}"):
        ExpertWeights(**{**tensors, name: tensor})


def test_tensors_stored_the_other_way_are_named() -> None:
    tensors = {"gate_up_proj": torch.ones(E, 2 * I, H), "down_proj": torch.ones(E, H, I)}
    with pytest.raises(ShapeError, match=r"gate_up_proj is \[6, 8, 8\] .* expected \[6, 4, 16\]"):
        ExpertWeights(**tensors, format=TRANSPOSED)


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
