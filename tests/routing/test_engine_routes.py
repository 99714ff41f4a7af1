import base64
import io

import numpy as np
import pytest
import torch

from epcomm import ShapeError
from epcomm.routing import routes_from_sglang, routes_from_vllm, routes_of_batch

NUM_LAYERS, TOP_K = 3, 2


def drawn(num_tokens: int, num_experts: int, num_columns: int = TOP_K) -> np.ndarray:
    shape = (num_tokens, NUM_LAYERS, num_columns)
    return np.random.default_rng(0).integers(0, num_experts, shape)


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (1000, np.uint16)])
def test_vllm_leaves_out_the_last_token_and_a_prefix(
    num_experts: int, dtype: type[np.generic], over_http: bool
) -> None:
    # A sequence of 8 tokens: 2 left out, 5 with routes, and the last one.
    sent: np.ndarray | str = drawn(5, num_experts).astype(dtype)
    sent[0, 0, 0] = num_experts - 1  # type: ignore[index]
    expected = torch.full((8, NUM_LAYERS, TOP_K), -1)
    expected[2:7] = torch.from_numpy(sent.astype(np.int64))  # type: ignore[union-attr]
    if over_http:
        file = io.BytesIO()
        np.save(file, sent)
        sent = base64.b64encode(file.getvalue()).decode()
    found = routes_from_vllm(sent, num_tokens=8, prompt_start=2)
    assert found.dtype is torch.int16
    assert torch.equal(found.long(), expected)


def test_sglang_has_shared_experts_in_the_last_columns() -> None:
    ids = drawn(5, 64, TOP_K + 1).astype(np.int32)
    ids[1, 2] = 255
    text = base64.b64encode(ids.tobytes()).decode()
    found = routes_from_sglang(
        text,
        num_tokens=8,
        num_layers=NUM_LAYERS,
        top_k=TOP_K,
        num_experts=64,
        num_fused_shared_experts=1,
        start=2,
    )
    expected = torch.full((8, NUM_LAYERS, TOP_K), -1)
    expected[2:7] = torch.from_numpy(ids[:, :, :TOP_K].astype(np.int64))
    expected[3, 2] = -1
    assert found.dtype is torch.int16
    assert torch.equal(found.long(), expected)
    # In a model with more than 255 experts, 255 is a valid id.
    found = routes_from_sglang(
        text, num_tokens=5, num_layers=NUM_LAYERS, top_k=TOP_K + 1, num_experts=256
    )
    assert torch.equal(found, torch.from_numpy(ids.astype(np.int16)))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1, 1], [0, 0, 1], [0, 1, 1]], [0, 1, 2, -1, -1, 10, -1, 20, 21]),
        ([[1, 1, 1], [1, 0, 0], [1, 1, 0]], [0, 1, 2, 10, -1, -1, 20, 21, -1]),
    ],
    ids=["left", "right"],
)
def test_padded_batch_has_no_routes_in_padding(mask: list[list[int]], expected: list[int]) -> None:
    routes = [
        torch.arange(10 * number, 10 * number + length, dtype=torch.int16).view(-1, 1, 1)
        for number, length in enumerate((3, 1, 2))
    ]
    found = routes_of_batch(routes, torch.tensor(mask))
    assert found.shape == (9, 1, 1)
    assert found.flatten().tolist() == expected


def test_routes_of_another_sequence_are_refused() -> None:
    ids = drawn(5, 64)
    with pytest.raises(ShapeError, match=r"\[5, 3, 2\] from token 2, expected .* the last of 6"):
        routes_from_vllm(ids, num_tokens=6, prompt_start=2)
    with pytest.raises(ShapeError, match="prompt tokens without routes"):
        routes_from_vllm(ids, num_tokens=8)
    with pytest.raises(ShapeError, match="expected at most 32767"):
        routes_from_vllm((ids + 40_000).astype(np.uint16), num_tokens=6)
    text = base64.b64encode(ids.astype(np.int32).tobytes()).decode()
    with pytest.raises(ShapeError, match="has 30 ids, expected a multiple of 4 layers"):
        routes_from_sglang(text, num_tokens=6, num_layers=4, top_k=TOP_K, num_experts=64)
    with pytest.raises(ShapeError, match=r"sequences have \[5\] tokens, expected \[6\]"):
        routes_of_batch([torch.from_numpy(ids)], torch.ones(1, 6))
