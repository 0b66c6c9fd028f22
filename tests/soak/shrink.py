# SPDX-License-Identifier: Apache-2.0
"""Fewer operations that still fail: chunks are left out, in halves first, as delta debugging does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool], more: Callable[[], bool] = lambda: True) -> list[T]:
    """The smallest list found that `fails`, which `items` must. Ends when nothing can be left out, or not `more()`."""
    kept = list(items)
    size = -(-len(kept) // 2)
    while kept and size:
        at, smaller = 0, False
        while at < len(kept) and more():
            shorter = kept[:at] + kept[at + size :]
            if fails(shorter):
                kept, smaller = shorter, True
            else:
                at += size
        if not more():
            break
        size = min(size, len(kept)) if smaller and size == 1 else size // 2
    return kept
