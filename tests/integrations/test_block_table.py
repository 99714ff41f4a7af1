import pytest
import torch

from epcomm import ConfigError, EPGroup, ExpertParallelMoE
from tests.cases.blocks import HIDDEN
from tests.integrations.block_table import DOCUMENT, Variant, make_block, render, table


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_every_block_of_transformers_is_as_the_document_says() -> None:
    with EPGroup() as group:
        rows = table(group)
    wrong = {row.variant.name: row.error for row in rows if not row.is_served and not row.refusal}
    assert not wrong, "served, and not equal"
    command = "run python -m tests.integrations.block_table, and read what changed"
    assert render(rows) == DOCUMENT.read_text(encoding="utf-8"), command


@pytest.mark.ranks(2)
def test_router_that_looks_experts_up_by_token_says_that_it_wants_input_ids(group: EPGroup) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

    hashing = {"mlp_layer_types": ["hash_moe"]}
    variant = Variant(block=DeepseekV4SparseMoeBlock, changes=hashing)
    moe = ExpertParallelMoE.from_transformers(make_block(variant), group)
    x = torch.zeros(1, 3, HIDDEN)
    with pytest.raises(ConfigError, match="input_ids is None, expected one id for each of the 3"):
        moe(x)
    with pytest.raises(ConfigError, match=r"input_ids is \[1, 2\], expected one id"):
        moe(x, torch.zeros(1, 2, dtype=torch.int64))
