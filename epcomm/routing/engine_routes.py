"""Read the routes that inference engines return, for replay_routes().

An engine returns the routes of one sequence. The last token has none, because it was sampled and
never went through a forward pass, and a prefix of the prompt may have been left out on request. The
readers return -1 for these tokens, which means that the router chooses.

    routes = [routes_from_vllm(output.routed_experts, num_tokens=len(ids)) for ...]
    with replay_routes(model, routes_of_batch(routes, attention_mask).to(device)):
        model(input_ids, attention_mask).loss.backward()

Source of the formats: vLLM 0.33.0 (routed_experts of a completion) and SGLang 0.5.23
(meta_info["routed_experts"]).
"""

import base64
import io
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from epcomm.errors import ShapeError

# The fill value of older versions of SGLang; an id only where there are more than 255 experts.
_SGLANG_FILL = 255


def routes_from_vllm(
    routed_experts: np.ndarray | str, *, num_tokens: int, prompt_start: int = 0
) -> Tensor:
    """Return the routes of a sequence that vLLM generated.

    Args:
        routed_experts: [tokens, layers, K], uint8 or uint16, as `CompletionOutput.routed_experts`
            has it; or base64 of np.save, as the HTTP server sends it.
        num_tokens: of the sequence, prompt and completion.
        prompt_start: the request's routed_experts_prompt_start, tokens of the prompt left out.

    Returns: [num_tokens, layers, K], int16, on the CPU; -1 for tokens without routes.

    Local.
    Raises:
        ShapeError: not three dimensions, or more tokens than the sequence has.
    """
    if isinstance(routed_experts, str):
        routed_experts = np.load(io.BytesIO(base64.b64decode(routed_experts)), allow_pickle=False)
    found = torch.from_numpy(np.asarray(routed_experts).astype(np.int64))
    return _in_sequence("routes_from_vllm", found, num_tokens, prompt_start)


def routes_from_sglang(
    routed_experts: str,
    *,
    num_tokens: int,
    num_layers: int,
    top_k: int,
    num_experts: int,
    num_fused_shared_experts: int = 0,
    start: int = 0,
) -> Tensor:
    """Return the routes of a sequence that SGLang generated.

    Args:
        routed_experts: base64 of the bytes of an int32 array, `meta_info["routed_experts"]`.
        num_tokens: of the sequence, prompt and completion.
        num_layers: num_hidden_layers of the text model.
        top_k: K, routed experts of a token, without fused shared experts.
        num_experts: E, routed experts; where it is at most 255, the fill value 255 becomes -1.
        num_fused_shared_experts: columns of shared experts, which come last and are dropped.
        start: the request's routed_experts_start_len, tokens of the prompt left out.

    Returns: [num_tokens, num_layers, top_k], int16, on the CPU; -1 for tokens without routes.

    Local.
    Raises:
        ShapeError: the bytes are not whole tokens of this size, or too many for the sequence.
    """
    values = torch.frombuffer(bytearray(base64.b64decode(routed_experts)), dtype=torch.int32)
    num_columns = top_k + num_fused_shared_experts
    if values.numel() % (num_layers * num_columns):
        raise ShapeError(
            f"routes_from_sglang: routed_experts has {values.numel()} ids, expected a multiple of "
            f"{num_layers} layers * ({top_k} experts + {num_fused_shared_experts} shared); pass "
            "the sizes of the model that generated"
        )
    found = values.view(-1, num_layers, num_columns)[:, :, :top_k].long()
    if num_experts <= _SGLANG_FILL:
        found = found.masked_fill(found == _SGLANG_FILL, -1)
    return _in_sequence("routes_from_sglang", found, num_tokens, start)


def routes_of_batch(routes: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return the routes of a padded batch, in the order in which its layers get the tokens.

    A batch of packed sequences has no padding: torch.cat(routes).

    Args:
        routes: of each sequence, [tokens, layers, K], on one device.
        mask: [B, S], the attention mask, nonzero for tokens; padding may be on either side.

    Returns: [B * S, layers, K], int16, on the device of the routes; -1 in padding.

    Local.
    Raises:
        ShapeError: the number of sequences or of their tokens is not that of the mask.
    """
    is_token = mask.to(routes[0].device).bool()
    expected, came = is_token.sum(dim=1).tolist(), [len(each) for each in routes]
    if came != expected:
        raise ShapeError(
            f"routes_of_batch: the sequences have {came} tokens, expected {expected} as in the "
            "mask; pass the routes of all tokens, -1 where the router chooses"
        )
    batch = routes[0].new_full((*mask.shape, *routes[0].shape[1:]), -1, dtype=torch.int16)
    batch[is_token] = torch.cat([each.to(torch.int16) for each in routes])
    return batch.flatten(0, 1)


def _in_sequence(caller: str, found: Tensor, num_tokens: int, start: int) -> Tensor:
    """Return routes of all tokens, with `found` from token `start` on and -1 elsewhere."""
    if found.dim() != 3 or start + len(found) not in (num_tokens - 1, num_tokens):
        raise ShapeError(
            f"{caller}: routed_experts is {list(found.shape)} from token {start}, expected "
            f"[tokens, layers, K] for all but at most the last of {num_tokens} tokens; pass the "
            "length of prompt and completion, and the number of prompt tokens without routes"
        )
    if found.numel() and int(found.max()) >= 2**15:
        raise ShapeError(f"{caller}: id {int(found.max())}, expected at most {2**15 - 1}")
    routes = torch.full((num_tokens, *found.shape[1:]), -1, dtype=torch.int16, device="cpu")
    routes[start : start + len(found)] = found.to(torch.int16)
    return routes
