"""The module deep_ep.utils: events here, and helpers of DeepEP's tests in its modules."""

from epcomm.integrations.deep_ep import EventHandle, EventOverlap  # noqa: F401
