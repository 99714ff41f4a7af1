"""The limits of sizes of the real package, and the ids that its kernels read."""

import torch
from torch import Tensor

from epcomm.config import environment
from epcomm.integrations.deep_ep import Config
from epcomm.integrations.deep_ep.v1.config import BUFFER_ALIGNMENT_BYTES, MAX_NVL_PEERS
from fakes.deep_ep.limits import require, require_size

# The real package counts 16 bytes at a time in an int32.
_MAX_BUFFER_BYTES = 16 * (2**31 - 1)
ONE_HOST = "the ranks are on one host: internode kernels are not reachable"


def check_buffer(
    num_ranks: int, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool
) -> None:
    """Check the sizes of a Buffer."""
    for num_bytes in (num_nvl_bytes, num_rdma_bytes):
        is_multiple = num_bytes % BUFFER_ALIGNMENT_BYTES == 0
        require_size(is_multiple, "num_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0")
        require_size(num_bytes < _MAX_BUFFER_BYTES, "num_bytes / sizeof(int4) < INT_MAX")
    fits = num_nvl_bytes < 2**31 or num_rdma_bytes == 0
    require_size(fits, "num_nvl_bytes <= INT_MAX or num_rdma_bytes == 0")
    rule = "num_ranks < NUM_MAX_NVL_PEERS or num_ranks % NUM_MAX_NVL_PEERS == 0"
    require_size(num_ranks < MAX_NVL_PEERS or num_ranks % MAX_NVL_PEERS == 0, rule)
    if num_rdma_bytes > 0:
        rule = "num_ranks > NUM_MAX_NVL_PEERS or low_latency_mode"
        require(num_ranks > MAX_NVL_PEERS or low_latency_mode, rule)


def queue_depth() -> int:
    """Return the entries of a send queue. The real constructor also writes NVSHMEM_* variables."""
    return int(environment().get("NVSHMEM_QP_DEPTH", "1024"))


def num_channels(config: Config) -> int:
    """Return the number of pairs of a sending and a receiving block."""
    require(config.sms % 2 == 0, "config.num_sms % 2 == 0")
    return config.num_channels


def require_nvl_bytes(config: Config, num_ranks: int, token_bytes: int, num_nvl_bytes: int) -> None:
    """Check the limit that both normal kernels have: the queues of all channels fit the buffer."""
    num_queues = num_channels(config) * num_ranks
    needed = 4 * num_ranks**2 + num_queues * (4 * 4 + config._nvl_recv_tokens * token_bytes)
    require_size(needed <= num_nvl_bytes, f"{needed} bytes of queues <= num_nvl_bytes")


def require_ids(topk_idx: Tensor, num_experts: int) -> None:
    """Require valid expert ids; with others the real kernels would write to arbitrary memory."""
    require(topk_idx.dtype == torch.int64, "topk_idx.scalar_type() == topk_idx_t")
    require(bool((topk_idx < num_experts).all()), "topk_idx < num_experts")
