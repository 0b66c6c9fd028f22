# SPDX-License-Identifier: Apache-2.0
"""A cache never breaks serving: what goes wrong in here is logged, at a bounded rate, and answered safely."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("vllm.pega")
F = TypeVar("F", bound=Callable[..., Any])

# At most one line per message in this many seconds; enough to see a fault, too few to fill a disk.
LOG_PERIOD_S = 30.0


class RateLimitedLog:
    """Logs each kind of message at most once per period and says how many were left out."""

    def __init__(self, period_s: float = LOG_PERIOD_S) -> None:
        self._period_s = period_s
        self._last: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, message: str, *args: object, level: int = logging.WARNING, exc: bool = False) -> None:
        now = time.monotonic()
        at, skipped = self._last.get(kind, (-self._period_s, 0))
        if now - at < self._period_s:
            self._last[kind] = (at, skipped + 1)
            return
        self._last[kind] = (now, 0)
        more = f" ({skipped} more like it in the last {now - at:.0f} s)" if skipped else ""
        logger.log(level, message + more, *args, exc_info=exc)


log_limited = RateLimitedLog()
faults = 0  # exceptions answered by `guarded` in this process; tests assert that it stays 0
_told = 0


def take_faults() -> int:
    """Faults of this process since the last call, whichever side of the connector asks."""
    global _told
    new, _told = max(0, faults - _told), faults
    return new


def guarded(default: Callable[[], Any]) -> Callable[[F], F]:
    """Makes a hook of vLLM total: an exception of ours becomes `default()` and one rate-limited line."""

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                global faults
                faults += 1
                log_limited(function.__name__, f"PegaConnector: {function.__name__} failed; serving goes on",
                            level=logging.ERROR, exc=True)  # fmt: skip
                return default()

        return call  # type: ignore[return-value]

    return wrap
