"""Be deep_ep: all names are those of epcomm.integrations.deep_ep."""

from epcomm.integrations.deep_ep import *  # noqa: F403
