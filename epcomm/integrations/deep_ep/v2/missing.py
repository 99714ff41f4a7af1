"""The calls of an ElasticBuffer that have nothing to do with experts: they are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

Shape = tuple[int, ...] | torch.Size
Shapes = Shape | Sequence[Shape]


def refuse(name: str, instead: str) -> NoReturn:
    """Raise NotImplementedError for a call that the facade does not have.

    name: of the call or the argument.   instead: what to use, an order.
    """
    raise NotImplementedError(
        f"deep_ep: {name} is not there in the deep_ep of epcomm, which moves tokens to experts "
        f"within one host; {instead}"
    )


_PEERS = "use torch.distributed.isend and irecv"
_GATHER = "use torch.distributed.all_gather_into_tensor"
_ENGRAM = "use the deep_ep package itself, on hosts with RDMA"


class NotThere:
    """The signatures of what an ElasticBuffer has beside dispatch and combine.

    All raise NotImplementedError, and name what to use.
    """

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, int]:
        refuse("get_engram_storage_size_hint", _ENGRAM)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        refuse("get_pp_buffer_size_hint", _PEERS)

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: dist.ProcessGroup, shapes: Shapes, dtype: torch.dtype
    ) -> int:
        refuse("get_agrs_num_max_session_bytes", _GATHER)

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> int:
        refuse("get_agrs_buffer_size_hint", _GATHER)

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        refuse("engram_write", _ENGRAM)

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Tensor]:
        refuse("engram_fetch", _ENGRAM)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        refuse("pp_set_config", _PEERS)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        refuse("pp_send", _PEERS)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        refuse("pp_recv", _PEERS)

    def create_agrs_session(self) -> None:
        refuse("create_agrs_session", _GATHER)

    def destroy_agrs_session(self) -> None:
        refuse("destroy_agrs_session", _GATHER)

    def agrs_new_session(self, enabled: bool = True) -> None:
        refuse("agrs_new_session", _GATHER)

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        refuse("agrs_set_config", _GATHER)

    def agrs_get_inplace_tensor(
        self, shapes: Shapes, dtype: torch.dtype
    ) -> Tensor | tuple[Tensor, ...]:
        refuse("agrs_get_inplace_tensor", _GATHER)

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> None:
        refuse("all_gather", _GATHER)
