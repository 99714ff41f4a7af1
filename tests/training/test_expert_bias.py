import math

import pytest
import torch

from epcomm import ConfigError, EPGroup, ShapeError
from epcomm.training.expert_bias import update_expert_bias


@pytest.mark.ranks(2)
def test_bias_follows_the_load_of_all_ranks(group: EPGroup) -> None:
    # Together 6, 4, 0, 6: the mean is 4. The counts of one rank would give another mean.
    load = torch.tensor([[6, 1, 0, 2], [0, 3, 0, 4]][group.rank])
    bias = torch.tensor([0.5, 0.0, -0.25, 1.0])
    address = bias.data_ptr()
    update_expert_bias(bias, load, group, rate=0.125)
    assert bias.tolist() == [0.375, 0.0, -0.125, 0.875]
    assert bias.data_ptr() == address
    rows = torch.stack((load - load // 2, load // 2))
    update_expert_bias(bias, rows, group, rate=0.125)
    assert bias.tolist() == [0.25, 0.0, 0.0, 0.75]


@pytest.mark.ranks(1)
def test_counts_beyond_float32_are_compared_exactly(group: EPGroup) -> None:
    bias = torch.zeros(3)
    update_expert_bias(bias, torch.tensor([2**40, 2**40 + 1, 2**40 + 2]), group)
    assert bias.sign().tolist() == [1, 0, -1]


@pytest.mark.ranks(1)
def test_wrong_arguments_are_refused(group: EPGroup) -> None:
    bias, load = torch.zeros(4), torch.ones(4, dtype=torch.int64)
    for wrong in (load[:3], load.float(), load.bool(), load.view(2, 2)):
        with pytest.raises(ShapeError, match=r"\[4\] or \[N, 4\]"):
            update_expert_bias(bias, wrong, group)
    with pytest.raises(ShapeError, match="expected floating point"):
        update_expert_bias(load, load, group)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="rate is"):
            update_expert_bias(bias, load, group, rate=rate)
    assert not bias.any()
