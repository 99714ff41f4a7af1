"""Decode with two micro-batches in turn, captured in one device graph where ranks have GPUs.

    scripts/launch_multi_rank.sh 2 examples/decode_two_micro_batches.py

The layers are those of two_micro_batches.py. Every step computes one token of each sequence, with
static caches of keys and values. On GPUs of one host, low latency over `nvlink` sends in
dispatch_async() and receives in wait(), its receive hook, so the rows of one micro-batch are under
way while the other computes; a graph of one step is replayed for every token. CPU ranks have no
graphs, and run the same steps eagerly. Each token is compared with that of the layers' own forward.
"""

import os
from collections.abc import Callable, Generator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import StaticCache
from two_micro_batches import MODELS, Part, make_model, run_layer

from epcomm import EPConfig, EPGroup, decode_phase, interleave

# Sequences of a micro-batch, and the tokens that each of them gets.
NUM_SEQUENCES, NUM_TOKENS = 4, 6
# Sizes that kernels of GPUs read.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}


# --8<-- [start:decode]
def decode(
    model: Part, x: Tensor, cache: StaticCache, position: Tensor
) -> Generator[None, None, Tensor]:
    """Compute all decoder layers for one token of each sequence, x [sequences, 1, H].

    position: [1], int64, on the device, where a replay reads its next value.
    """
    rotary = model.rotary_emb(x, position_ids=position[None])
    is_past = torch.arange(NUM_TOKENS, device=x.device) <= position
    for layer in model.layers:
        x = yield from run_layer(
            layer, x, rotary, attention_mask=is_past[None, None, None], past_key_values=cache
        )
    return x


def captured(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Return a function that replays a step from a graph. The step has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return ys

    return replay


# --8<-- [end:decode]


class Decoder:
    """Two micro-batches, with their tokens and caches, which every step reads where they are."""

    def __init__(self, model: Part, device: torch.device, dtype: torch.dtype) -> None:
        """Make empty caches."""
        shape = (NUM_SEQUENCES, 1, model.config.hidden_size)
        self.model = model
        self.xs = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
        self.caches = [StaticCache(model.config, max_cache_len=NUM_TOKENS) for _ in range(2)]
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> list[Tensor]:
        """Compute both micro-batches in turn."""
        batches = zip(self.xs, self.caches, strict=True)
        return interleave(*(decode(self.model, x, c, self.position) for x, c in batches))

    def plain_step(self) -> list[Tensor]:
        """Compute one micro-batch after the other, by the forward of their layers."""
        ys = []
        is_past = torch.arange(NUM_TOKENS, device=self.position.device) <= self.position
        for x, cache in zip(self.xs, self.caches, strict=True):
            y, rotary = x, self.model.rotary_emb(x, position_ids=self.position[None])
            mask = is_past[None, None, None]
            for layer in self.model.layers:
                y = layer(y, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
            ys.append(y)
        return ys

    def run(self, step: Callable[[], list[Tensor]], tokens: Tensor) -> list[Tensor]:
        """Return the results of all tokens [NUM_TOKENS, 2, sequences, 1, H], from empty caches."""
        for cache in self.caches:
            cache.reset()
        found = []
        for number, xs in enumerate(tokens):
            self.position.fill_(number)
            for x, token in zip(self.xs, xs, strict=True):
                x.copy_(token)
            found += [y.clone() for y in step()]
        return found


def main() -> None:
    """Decode with both models, and compare."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    has_gpus = 0 < num_local <= torch.cuda.device_count()
    device, dtype = torch.device("cpu"), torch.float32
    if has_gpus:
        device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    config = EPConfig(mode="low_latency", max_tokens_per_rank=NUM_SEQUENCES)
    with EPGroup() as group, torch.no_grad():
        for name in MODELS:
            with torch.device(device):
                model = make_model(name, group, config, SIZES, dtype=dtype)
            torch.manual_seed(1 + group.rank)
            shape = (NUM_TOKENS, 2, NUM_SEQUENCES, 1, SIZES["hidden_size"])
            tokens = torch.randn(shape).to(device, dtype)
            decoder = Decoder(model, device, dtype)
            with decode_phase(model):
                expected = decoder.run(decoder.plain_step, tokens)
                ys, how = decoder.run(decoder.step, tokens), "eagerly: a CPU has no graphs"
                if has_gpus:
                    ys, how = decoder.run(captured(decoder.step), tokens), "from a graph"
            layers = [each.mlp.experts for each in model.layers if hasattr(each.mlp, "experts")]
            for layer in layers:
                layer.check()
            is_equal = all(map(torch.equal, ys, expected))
            backend = layers[0].plan.decode.backend
            print(
                f"{name}, rank {group.rank}: decoded over {backend} {how}, equal {is_equal}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
