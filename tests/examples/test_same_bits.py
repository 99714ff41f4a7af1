import re

import pytest
import torch.distributed as dist

from tests.examples.programs import EXAMPLES, run_program


@pytest.mark.ranks(2)
def test_decode_has_the_checksum_of_prefill() -> None:
    printed = run_program(EXAMPLES / "same_bits.py")
    if dist.get_rank() == 0:
        found = re.fullmatch(
            r"2 ranks: y (\w{8})  decoded (\w{8})  dx \w{8}  dweights \w{8}\n", printed
        )
        assert found[1] == found[2]
