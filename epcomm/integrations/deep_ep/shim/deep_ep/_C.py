# ruff: noqa: N999
"""The extension module of deep_ep 2.x, as far as programs import it."""

from epcomm.integrations.deep_ep import Config, EventHandle, topk_idx_t  # noqa: F401
