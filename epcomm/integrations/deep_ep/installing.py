"""Install the drop-in as deep_ep: put a folder with a package of this name first in the path.

An entry of sys.modules does not suffice, because programs ask importlib for the package and for its
version before they import it, and spawned processes inherit the path.
"""

import importlib
import re
import sys
from pathlib import Path

from epcomm.errors import ConfigError
from epcomm.platforms.deep_ep import DeepEPKind, find_deep_ep

SHIM = Path(__file__).parent / "shim"
_NAME = "deep_ep"
# Modules of Megatron, SGLang, vLLM and torchtitan that look for deep_ep when they are imported, and
# remember the result.
_CLIENT = re.compile(r"(^|[._])(deepep|fused_a2a)([._]|$)")
_COMMAND = "python -m epcomm.integrations.deep_ep PROGRAM"


def install(*, replace: bool = False) -> None:
    """Make `import deep_ep` import the drop-in, here and in processes that this one spawns.

    Programs that are started later, such as workers of a cluster, need PYTHONPATH: run the program
    by `python -m epcomm.integrations.deep_ep PROGRAM`.

    replace: replace a real deep_ep, if one is installed.

    Process-wide. Local, idempotent.
    Raises:
        ConfigError: a real deep_ep is installed and replace is not set; or deep_ep, or a module
            that looks for it at import, is already imported.
    """
    loaded = sys.modules.get(_NAME)
    if loaded is not None:
        if hasattr(loaded, "is_epcomm_drop_in"):
            return
        raise ConfigError(
            f"install: deep_ep was imported already, from {getattr(loaded, '__file__', None)}, "
            f"expected install() before it; call install() first, or run {_COMMAND}"
        )
    clients = [
        name
        for name in sys.modules
        if _CLIENT.search(name) and name.partition(".")[0] not in ("epcomm", "fakes", "tests")
    ]
    if clients and str(SHIM) not in sys.path:
        raise ConfigError(
            f"install: {clients[0]} was imported already, which looks for deep_ep at its import, "
            f"expected install() before it; call install() first, or run {_COMMAND}"
        )
    check_alone(replace=replace)
    if str(SHIM) not in sys.path:
        sys.path.insert(0, str(SHIM))
        importlib.invalidate_caches()


def check_alone(*, replace: bool) -> None:
    """Raise ConfigError if a real deep_ep is installed and `replace` is not set."""
    found = find_deep_ep()
    if replace or found is None or found.kind is DeepEPKind.DROP_IN:
        return
    raise ConfigError(
        f"install: a deep_ep is installed, {found.kind.value}, expected none; pass replace=True to "
        "replace it in this process, or --replace on the command line"
    )
