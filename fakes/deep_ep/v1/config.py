"""Imitate Config of the normal kernels, its tables, and the sizes of buffers."""

from __future__ import annotations

from types import MappingProxyType

from fakes.deep_ep.limits import is_enforced, require, require_size

# Ranks that reach one another by NVLink.
MAX_NVL_PEERS = 8
# Bytes: sizes of buffers are multiples of it.
BUFFER_ALIGNMENT_BYTES = 128
# Most ids and scales of a token that the size hint assumes, and bytes of the token's source.
_MAX_TOPK = _MAX_SCALES = 128
_SOURCE_META_BYTES = 8

# Ranks -> the last four arguments of Config, for dispatch and for combine.
_DISPATCH = MappingProxyType(
    {
        2: (24, 256, 6, 128),
        4: (6, 256, 6, 128),
        8: (6, 256, 6, 128),
        16: (36, 288, 20, 128),
        24: (32, 288, 8, 128),
        32: (32, 288, 8, 128),
        48: (32, 288, 8, 128),
        64: (32, 288, 8, 128),
        96: (20, 480, 12, 128),
        128: (20, 560, 12, 128),
        144: (32, 720, 12, 128),
        160: (28, 720, 12, 128),
    }
)
_COMBINE = MappingProxyType(
    {
        2: (10, 256, 6, 128),
        4: (9, 256, 6, 128),
        8: (4, 256, 6, 128),
        16: (4, 288, 12, 128),
        24: (1, 288, 8, 128),
        32: (1, 288, 8, 128),
        48: (1, 288, 8, 128),
        64: (1, 288, 8, 128),
        96: (1, 480, 8, 128),
        128: (1, 560, 8, 128),
        144: (2, 720, 8, 128),
        160: (2, 720, 8, 128),
    }
)


class Config:
    """The number of SMs of the normal kernels, and how far a sender may run ahead."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        require(num_sms >= 0, "num_sms >= 0")
        nvl_send, nvl_recv = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        require(0 < nvl_send < nvl_recv, "nvl_chunked_send_tokens < nvl_chunked_recv_tokens")
        rdma_send, rdma_recv = num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        require(
            0 < rdma_send <= rdma_recv // 2,
            "rdma_chunked_send_tokens <= rdma_chunked_recv_tokens / 2",
        )
        # Not under the names of the arguments: the real class shows no attributes.
        self._num_sms = num_sms
        self._nvl_recv_tokens = nvl_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the NVLink buffer for any top-k and any scales up to 128 of each."""
        require(
            num_ranks < MAX_NVL_PEERS or num_ranks % MAX_NVL_PEERS == 0,
            "num_ranks < NUM_MAX_NVL_PEERS or num_ranks % NUM_MAX_NVL_PEERS == 0",
        )
        num_rdma_ranks = max(num_ranks // MAX_NVL_PEERS, 1)
        num_queues = self._num_sms // 2 * min(num_ranks, MAX_NVL_PEERS)
        token_bytes = hidden_bytes + _SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        num_bytes = num_queues * (
            4 * (2 * num_rdma_ranks + 3) + self._nvl_recv_tokens * token_bytes
        )
        return -(-num_bytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0, because all ranks of the imitation are on one host.

        Raises:
            RuntimeError: more ranks than NVLink joins.
        """
        require(num_ranks <= MAX_NVL_PEERS, "the fake has one host: num_ranks <= 8")
        return 0


def num_channels(config: Config) -> int:
    """Return the number of pairs of a sending and a receiving block."""
    require(config._num_sms % 2 == 0, "config.num_sms % 2 == 0")
    return config._num_sms // 2


def require_nvl_bytes(config: Config, num_ranks: int, token_bytes: int, num_nvl_bytes: int) -> None:
    """Check the limit that both normal kernels have: the queues of all channels fit the buffer."""
    num_queues = num_channels(config) * num_ranks
    needed = 4 * num_ranks**2 + num_queues * (4 * 4 + config._nvl_recv_tokens * token_bytes)
    require_size(needed <= num_nvl_bytes, f"{needed} bytes of queues <= num_nvl_bytes")


def dispatch_config(num_sms: int, num_ranks: int) -> Config:
    """Return the recommended Config; any number of ranks with the limits off."""
    return _from_table(_DISPATCH, num_sms, num_ranks)


def combine_config(num_sms: int, num_ranks: int) -> Config:
    """Return the recommended Config; any number of ranks with the limits off."""
    return _from_table(_COMBINE, num_sms, num_ranks)


def _from_table(
    table: MappingProxyType[int, tuple[int, int, int, int]], num_sms: int, num_ranks: int
) -> Config:
    known = num_ranks in table or not is_enforced()
    assert known, f"Unsupported number of EP ranks: {num_ranks}"
    return Config(num_sms, *table.get(num_ranks, table[MAX_NVL_PEERS]))


def low_latency_bytes(max_tokens: int, hidden_size: int, num_experts: int) -> int:
    """Bytes of both low-latency buffers, whatever the number of ranks.

    Worked example, M = 16, H = 2048, E = 8: a combine message has 4160 bytes, 128 of them 532480,
    two to send and two to receive 2129920, and 128 for the signals of each: 2130176.
    """
    num_scales = hidden_size // 128
    dispatch_bytes = 16 + max(2 * hidden_size, hidden_size + 4 * num_scales)
    combine_bytes = combine_message_bytes(hidden_size)
    send_bytes = max(max_tokens * dispatch_bytes, num_experts * max_tokens * combine_bytes)
    recv_bytes = num_experts * max_tokens * max(dispatch_bytes, combine_bytes)
    signal_bytes = -(-4 * num_experts // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
    return 2 * (send_bytes + recv_bytes + signal_bytes)


def combine_message_bytes(hidden_size: int) -> int:
    """Return the bytes of a bfloat16 row and of the extremes of each 128 elements."""
    return 2 * hidden_size + 4 * (hidden_size // 128)
