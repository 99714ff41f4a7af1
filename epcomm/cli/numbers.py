"""Numbers as the terminal shows them."""

from __future__ import annotations


def bytes_text(number: int) -> str:
    """Write bytes exactly, and from 1 MiB on, where that alone is hard to read, in MiB too."""
    return f"{number:,} B" + (f" ({number / 2**20:,.1f} MiB)" if number >= 2**20 else "")
