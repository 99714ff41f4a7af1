"""Config of the normal kernels of V1, and the sizes of its buffers that V1 requires.

epcomm's buffers use only the number of SMs; programs compute with the other numbers. Sources:
deepseek-ai/DeepEP, csrc/legacy/config.hpp; a recording of the real package.
"""

from epcomm.errors import ConfigError
from epcomm.types import align_up

# The most ranks that reach one another by NVLink.
MAX_NVL_PEERS = 8
# Sizes of buffers are multiples of this number of bytes.
BUFFER_ALIGNMENT_BYTES = 128
# Most ids and scales of a token that the size hint assumes, and bytes of the token's source.
_MAX_TOPK = _MAX_SCALES = 128
_SOURCE_META_BYTES = 8


class Config:
    """The number of SMs of the normal kernels, and how far a sender of V1 may run ahead."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        nvl = (num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens)
        rdma = (num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens)
        if num_sms < 0 or not 0 < nvl[0] < nvl[1] or not 0 < rdma[0] <= rdma[1] // 2:
            raise ConfigError(
                f"Config: num_sms is {num_sms}, NVLink sends {nvl[0]} of {nvl[1]} tokens and RDMA "
                f"{rdma[0]} of {rdma[1]}, expected num_sms >= 0, fewer sent than received over "
                "NVLink and at most half over RDMA; use Buffer.get_dispatch_config()"
            )
        # The attributes are private, because the class of V1 has no public ones.
        self.sms = num_sms
        # Channels of V1: pairs of a sending and a receiving SM, which define the layout of its
        # handles.
        self.num_channels = max(num_sms // 2, 1)
        self._nvl_recv_tokens = nvl[1]

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return num_nvl_bytes of V1 for any top-k and any scales up to 128 of each."""
        if num_ranks >= MAX_NVL_PEERS and num_ranks % MAX_NVL_PEERS:
            raise ConfigError(
                f"get_nvl_buffer_size_hint: num_ranks is {num_ranks}, expected fewer than "
                f"{MAX_NVL_PEERS} or a multiple of it; make groups of whole hosts"
            )
        num_hosts = max(num_ranks // MAX_NVL_PEERS, 1)
        num_queues = self.num_channels * min(num_ranks, MAX_NVL_PEERS)
        row_bytes = hidden_bytes + _SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        num_bytes = num_queues * (4 * (2 * num_hosts + 3) + self._nvl_recv_tokens * row_bytes)
        return align_up(num_bytes, BUFFER_ALIGNMENT_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return num_rdma_bytes of V1 for normal mode on one host, 0."""
        if num_ranks > MAX_NVL_PEERS:
            raise NotImplementedError(
                f"get_rdma_buffer_size_hint: num_ranks is {num_ranks}, expected at most "
                f"{MAX_NVL_PEERS}, the ranks of one host; for several use epcomm's own API, with "
                "backend collective or deep_ep_v1"
            )
        return 0
