import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, Int8ChannelWeights, TopKOutput
from epcomm.fuseep.path import FuseEPPath
from tests.fakes.ascend import fuseep
from tests.fakes.ascend.recorded import tensor_of

MODES = {"mode1": "fused_deep_moe", "mode2": "dispatch_ffn_combine"}


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("small_a3")
def test_layers_equal_the_golden_values(group: EPGroup) -> None:
    """Check packing, routing and counts of our layers, with M = 5 of which rank 1 uses 3."""
    w13, w2, s13, s2 = fuseep.weights()
    weights = Int8ChannelWeights(gate_up_proj=w13, gate_up_scale=s13, down_proj=w2, down_scale=s2)
    recorded = fuseep.RECORDED
    listed = {key.split()[0]: value for key, value in recorded["counts"].items()}
    rank = group.rank
    x, (ids, topk_weights) = fuseep.hidden_states(rank), fuseep.topk(rank)
    topk = TopKOutput(topk_ids=ids, topk_weights=topk_weights)
    for mode, backend in MODES.items():
        config = EPConfig(mode="fuseep", backend=backend, max_tokens_per_rank=fuseep.M)
        layer = ExpertParallelExperts(weights, group, config, top_k=fuseep.K)
        assert isinstance(layer.path, FuseEPPath)
        out = layer.path.run(x, topk, layer.weights)
        assert fuseep.digest(out.y) == recorded[mode]["y_sha256"][rank]
        assert torch.equal(out.y[:, :16], tensor_of(recorded[mode]["y_first_16_columns"][rank]))
        counts = torch.tensor(listed[mode][rank]).view(fuseep.L, -1).sum(1)
        assert out.num_tokens_per_expert.dtype == torch.int32
        assert out.num_tokens_per_expert.tolist() == counts.tolist()
        assert out.is_reduced is True
        # The call of the layer is the same in both phases.
        assert torch.equal(layer(x, topk, decode=True), out.y)
        layer.check()
