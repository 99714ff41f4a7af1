"""Text from a trained model: one prompt a rank, prefill in normal mode, decode in low latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from epcomm import decode_phase
from epcomm.testing.oracle import relative_error


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Hold what one rank wrote.

    sequence: [prompt + new], int64, bytes.   logits: [new, 256], of each new byte.
    """

    sequence: Tensor
    logits: Tensor

    @property
    def text(self) -> str:
        """The new bytes as text."""
        new = self.sequence[-len(self.logits) :]
        return bytes(new.tolist()).decode("utf-8", errors="replace")


@torch.no_grad()
def generate(model: Qwen3MoeForCausalLM, prompt: Tensor, num_bytes: int) -> Generated:
    """Continue `prompt` [T] by the likeliest byte, num_bytes times.

    Collective: yes, every rank continues its own prompt by as many bytes.
    """
    out = model(input_ids=prompt.unsqueeze(0), use_cache=True)
    logits, sequence = [out.logits[0, -1]], [prompt, out.logits[0, -1].argmax().view(1)]
    with decode_phase(model):
        for _ in range(num_bytes - 1):
            out = model(
                input_ids=sequence[-1].unsqueeze(0),
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            logits.append(out.logits[0, -1])
            sequence.append(logits[-1].argmax().view(1))
    return Generated(sequence=torch.cat(sequence), logits=torch.stack(logits))


def gather_generated(mine: Generated) -> list[Generated]:
    """Return what all ranks wrote, by rank; prompts of one length. Collective: yes."""
    num_ranks = dist.get_world_size()
    sequences = [torch.empty_like(mine.sequence) for _ in range(num_ranks)]
    logits = [torch.empty_like(mine.logits) for _ in range(num_ranks)]
    dist.all_gather(sequences, mine.sequence)
    dist.all_gather(logits, mine.logits)
    return [
        Generated(sequence=sequence, logits=values)
        for sequence, values in zip(sequences, logits, strict=True)
    ]


@torch.no_grad()
def difference_from_one_process(model: Qwen3MoeForCausalLM, written: Sequence[Generated]) -> float:
    """Largest relative difference of any rank's logits from one pass of a whole, plain model."""
    differences = []
    for generated in written:
        expected = model(input_ids=generated.sequence[:-1].unsqueeze(0)).logits[0]
        num_new = len(generated.logits)
        differences.append(relative_error(generated.logits, expected[-num_new:]))
    return max(differences)
