import pytest
import torch
from torch import nn

from epcomm import EPGroup, ExpertParallelMoE, ShapeError
from epcomm.training.checkpoints import gather_state_dict, load_full_state_dict
from tests.cases.blocks import NUM_EXPERTS, qwen3_moe

NUM_RANKS = 2
EXPERT_NAMES = {"experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.ranks(NUM_RANKS)
def test_one_layer_under_two_names_is_whole_under_both(group: EPGroup) -> None:
    moe = ExpertParallelMoE.from_transformers(qwen3_moe().to(group.device), group)
    model = nn.ModuleDict({"first": moe, "again": moe})
    state = gather_state_dict(model, group)
    for name in EXPERT_NAMES:
        assert state[f"first.{name}"].shape[0] == NUM_EXPERTS
        assert torch.equal(state[f"first.{name}"], state[f"again.{name}"])
    load_full_state_dict(model, state)


@pytest.mark.ranks(NUM_RANKS)
def test_state_of_one_rank_is_refused_as_a_whole(group: EPGroup) -> None:
    moe = ExpertParallelMoE.from_transformers(qwen3_moe().to(group.device), group)
    with pytest.raises(ShapeError) as caught:
        load_full_state_dict(moe, moe.state_dict())
    assert "holds 4 experts, expected all 8; gather the state first" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        load_full_state_dict(moe, {})
