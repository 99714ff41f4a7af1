"""Check the chip's limits of sizes, which either test mode lifts."""

from fakes.ascend import limits
from fakes.deep_ep.limits import is_enforced


def require_size(operator: str, condition: bool, rule: str) -> None:
    """Require a limit that soc(size_limits=False) lifts, and limits_off() of fakes.deep_ep."""
    if is_enforced():
        limits.require_size(operator, condition, rule)
