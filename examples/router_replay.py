"""Generate text on some ranks, then train on it on others with the experts that generation chose.

    scripts/launch_multi_rank.sh 2 examples/router_replay.py generate FOLDER
    scripts/launch_multi_rank.sh 4 examples/router_replay.py train FOLDER

The first command is the rollout: a byte-level Qwen3-MoE in bfloat16 samples text by prefill and
decode while its routes are recorded, and saves text, routes and log-probabilities. The second
trains the same model in float32 on the text, once with live routes and once with replayed ones. It
prints how often the routers disagree, and how far the log-probabilities of the two programs differ.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import torch
import torch.distributed as dist
import typer
from plain_model import ModelSize, build_model
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from epcomm import EPConfig, EPGroup, ExpertParallelMoE, decode_phase
from epcomm.routing import ReplayCounts, RouteReplay, record_routes, replay_routes
from epcomm.training.gradients import sum_replicated_gradients

SIZE = ModelSize(num_layers=4, num_experts=32)
SEED = 0
# Sequences of a rank of the rollout, and their bytes.
NUM_SEQUENCES, PROMPT_LENGTH, NUM_WRITTEN = 8, 16, 48
NUM_STEPS, LEARNING_RATE = 3, 1e-3

app = typer.Typer(add_completion=False)
Folder = Annotated[Path, typer.Argument(help="For the texts and routes of the rollout.")]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sequences that were generated.

    ids: [B, S], int64, prompt and completion.   log_probs: [B, NUM_WRITTEN], of the completion.
    routes: [B, S, layers, K], int16; -1 for the last byte, which no forward pass has seen.
    """

    ids: Tensor
    log_probs: Tensor
    routes: Tensor

    def part(self, number: int, num_parts: int) -> Self:
        """Return the sequences of one of several ranks."""
        parts = {name: each.chunk(num_parts)[number] for name, each in vars(self).items()}
        return replace(self, **parts)


def build(group: EPGroup, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """Return the model with its experts distributed over the group. Collective: yes."""
    model = build_model(SIZE, seed=SEED).to(dtype)  # type: ignore[arg-type]
    config = EPConfig(max_tokens_per_rank=NUM_SEQUENCES)
    for layer in model.model.layers:
        layer.mlp = ExpertParallelMoE.from_transformers(layer.get_submodule("mlp"), group, config)
    return model


@torch.no_grad()
def roll_out(model: Qwen3MoeForCausalLM, prompts: Tensor, generator: torch.Generator) -> Rollout:
    """Continue prompts [B, S] by sampled bytes. Collective: yes."""
    ids, log_probs = prompts, []
    with record_routes(model) as record:
        out = model(input_ids=prompts, use_cache=True)
        for _ in range(NUM_WRITTEN):
            distribution = torch.log_softmax(out.logits[:, -1].float(), dim=-1)
            new = torch.multinomial(distribution.exp(), 1, generator=generator)
            ids = torch.cat([ids, new], dim=1)
            log_probs.append(distribution.gather(1, new))
            if len(log_probs) < NUM_WRITTEN:
                with decode_phase(model):
                    out = model(input_ids=new, past_key_values=out.past_key_values, use_cache=True)
    # One forward has the prompts of all sequences, and each other one a byte of all sequences.
    routes = [each.unflatten(0, (len(prompts), -1)) for each in record.calls()]
    routes.append(torch.full_like(routes[-1], -1))
    return Rollout(ids=ids, log_probs=torch.cat(log_probs, dim=1), routes=torch.cat(routes, dim=1))


def log_probs_of(model: Qwen3MoeForCausalLM, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the completion, [B, NUM_WRITTEN]. Collective: yes."""
    distribution = torch.log_softmax(model(input_ids=ids).logits.float(), dim=-1)
    return distribution[:, :-1].gather(2, ids[:, 1:, None])[:, -NUM_WRITTEN:, 0]


def rewards_of(ids: Tensor) -> Tensor:
    """Return a reward for each sequence, [B]: the share of small bytes in the completion."""
    return (ids[:, -NUM_WRITTEN:] < 128).double().mean(dim=1)


def step(
    model: Qwen3MoeForCausalLM, group: EPGroup, optimizer: torch.optim.Optimizer, mine: Rollout
) -> float:
    """Take a step of policy gradients; return the mean difference of log-probabilities.

    Collective: yes.
    """
    optimizer.zero_grad()
    log_probs = log_probs_of(model, mine.ids)
    advantages = (rewards_of(mine.ids) - 0.5).to(log_probs)
    ratio = (log_probs - mine.log_probs).exp()
    num_sequences = len(mine.ids) * group.world_size
    (-(ratio * advantages[:, None]).mean(dim=1).sum() / num_sequences).backward()
    sum_replicated_gradients(model, group)
    optimizer.step()
    difference = (log_probs.detach() - mine.log_probs).abs().mean()
    dist.all_reduce(difference)
    return float(difference) / group.world_size


@app.command()
def generate(folder: Folder) -> None:
    """Sample text on every rank, and save it with its routes."""
    with EPGroup() as group:
        model = build(group, torch.bfloat16).eval()
        generator = torch.Generator().manual_seed(SEED + group.rank)
        prompts = torch.randint(0, 256, (NUM_SEQUENCES, PROMPT_LENGTH), generator=generator)
        rollout = roll_out(model, prompts, generator)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(rollout), folder / f"rollout_{group.rank}.pt")
    if group.rank == 0:
        num_bytes = NUM_WRITTEN * NUM_SEQUENCES * group.world_size
        Console().print(f"{num_bytes} bytes generated on {group.world_size} ranks in bfloat16")


@app.command()
def train(folder: Folder) -> None:
    """Train on saved text with live and with replayed routes, and compare."""
    parts = [torch.load(path) for path in sorted(folder.glob("rollout_*.pt"))]
    whole = Rollout(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    with EPGroup() as group:
        mine = whole.part(group.rank, group.world_size)
        routes = mine.routes.flatten(0, 1)
        differences: dict[str, list[float]] = {}
        replay: RouteReplay | None = None
        for name in ("live", "replayed"):
            model = build(group, torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
            found = differences[name] = []
            for number in range(NUM_STEPS):
                if name == "live":
                    found.append(step(model, group, optimizer, mine))
                    continue
                with replay_routes(model, routes) as each:
                    found.append(step(model, group, optimizer, mine))
                replay = each if number == 0 else replay
        assert replay is not None, "the second round replays"
        shares = shares_of_layers(group, replay)
    if group.rank == 0:
        report(shares, differences, group.world_size)


def shares_of_layers(group: EPGroup, replay: RouteReplay) -> dict[int, ReplayCounts]:
    """Return the disagreement over the tokens of all ranks. Collective: yes."""
    found = {}
    for layer, counts in replay.disagreement().items():
        total = torch.tensor(list(vars(counts).values()))
        dist.all_reduce(total)
        found[layer] = ReplayCounts.of(total)
    return found


def report(
    shares: dict[int, ReplayCounts], differences: dict[str, list[float]], num_ranks: int
) -> None:
    """Print the comparison."""
    table = Table("layer", "tokens that differ", "entries that differ")
    for layer, counts in shares.items():
        table.add_row(str(layer), f"{counts.token_share:.1%}", f"{counts.entry_share:.1%}")
    console = Console()
    console.print(f"trained on {num_ranks} ranks in float32; live choice against the rollout's")
    console.print(table)
    for name, found in differences.items():
        values = ", ".join(f"{each:.5f}" for each in found)
        console.print(f"mean |log-probability - rollout's|, {name} routes, by step: {values}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    app(standalone_mode=False)
    dist.destroy_process_group()
