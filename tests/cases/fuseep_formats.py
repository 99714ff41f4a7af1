from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fakes.ascend.formats import ACL_FORMAT_ND, format_of


@contextmanager
def device_that_keeps(allows_nz: bool) -> Iterator[None]:
    """Imitate a device that reports the format of a tensor, and may convert it to row-major."""
    library = torch.library.Library("npu", "FRAGMENT")

    def get_npu_format(input: Tensor) -> int:
        return format_of(input) if allows_nz else ACL_FORMAT_ND

    library.define("get_npu_format(Tensor input) -> int")
    library.impl("get_npu_format", get_npu_format, "CPU")
    try:
        yield
    finally:
        library._destroy()
