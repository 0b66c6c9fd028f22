# SPDX-License-Identifier: Apache-2.0
"""Between the worker and its native engine: counts what passes and, at a rate, lets it fail as the engine may fail."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any


class Seam:
    """Stands in for the worker's engine. Every failure is one that the engine's interface allows."""

    def __init__(self, engine: Any, rate: float, seed: str, counts: Counter[str]) -> None:
        self._engine = engine
        self._rate = rate
        self._rng = random.Random(seed)
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _hit(self, what: str) -> bool:
        if self._rng.random() >= self._rate:
            return False
        self._counts["injected"] += 1
        self._counts[f"injected {what}"] += 1
        return True

    def record_event(self, stream: int) -> int:
        if self._hit("event"):
            raise RuntimeError("injected: no event")
        return int(self._engine.record_event(stream))

    def submit(self, *args: Any, **kwargs: Any) -> bool:
        if self._hit("refusal"):
            raise ValueError("injected: refused")
        if self._hit("full queue"):
            return False
        return bool(self._engine.submit(*args, **kwargs))

    def poll(self) -> list[Any]:
        results = []
        for result in self._engine.poll():
            # Only a transfer that is over can be turned into a failed one: no copy of it may still touch memory.
            if result.status == "done" and self._hit(f"failed {result.direction}"):
                fields = {name: getattr(result, name) for name in dir(result) if not name.startswith("_")}
                result = SimpleNamespace(**{**fields, "status": "failed", "error": "injected"})
            self._counts[f"{result.direction}s {result.status}"] += 1
            self._counts[f"{result.direction} {result.backend}"] += 1
            results.append(result)
        return results
