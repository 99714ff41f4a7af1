import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name)
        yield Path(name[0])
        dist.barrier()
