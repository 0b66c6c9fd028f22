# SPDX-License-Identifier: Apache-2.0
"""Engines under injected faults, of one rank in this process or of several in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.serving.engine import POISON, Engine, one_seed
from vllm_pega_connector.faults import parse

Rank = tuple[int, int]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """For what reads its variables at start; they are gone afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# --- what is run on a rank, by vLLM's own call to its workers ---


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def arm_rank(_: Any, text: str) -> None:
    _worker()._engine.arm(parse(text) if text else ())


def poison_rank(_: Any) -> None:
    for tensor in _worker()._kv_caches.values():
        tensor.fill_(POISON)


def rank_state(_: Any) -> dict[str, Any]:
    from vllm_pega_connector import guard

    worker = _worker()
    return {
        "rank": worker._rank,
        "pid": os.getpid(),
        "rules": [str(t.rule.action) for t in worker._engine._jobs],
        "pending": worker._engine.pending,
        "loads": len(worker._loads),
        "swallowed": guard.faults,
    }


@dataclass(frozen=True)
class Report:
    at: float
    rank: Rank
    job_id: int
    error: str


class Reports:
    """What the ranks reported, when a job then counted as ended, and what came from the pool, between two moments."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.connector._scheduler
        self.reports: list[Report] = []
        self.ended: dict[int, float] = {}
        self.directions: dict[int, str] = {}
        self.hit_tokens = 0

    def __enter__(self) -> Reports:
        report, jobs = self._scheduler._report, self._scheduler._shared.jobs

        def reported(rank: Rank, job_id: int, error: str) -> None:
            self.reports.append(Report(time.monotonic(), rank, job_id, error))
            before = jobs.get(job_id)
            report(rank, job_id, error)
            if before is not None:
                self.directions[job_id] = before.direction
                if job_id not in jobs:
                    self.ended[job_id] = time.monotonic()

        self._scheduler._report = reported
        self._hits_before = self._engine.hit_tokens
        return self

    def __exit__(self, *exc: object) -> None:
        del self._scheduler._report
        self.hit_tokens = self._engine.hit_tokens - self._hits_before

    def of(self, job_id: int) -> list[Report]:
        return [r for r in self.reports if r.job_id == job_id]

    def jobs(self, direction: str, well: bool = True) -> list[int]:
        """Those that ended, well or not: on every rank, or not on every one."""
        ended = [j for j in self.ended if self.directions[j] == direction]
        return [j for j in ended if well is not any(r.error for r in self.of(j))]


class FaultyEngine(Engine):
    """`faults`: as in VLLM_PEGA_FAULTS, read at the start; `armed` puts others in its place."""

    def __init__(self, extra_config: dict[str, Any], faults: str, **options: Any) -> None:
        with environment(VLLM_PEGA_FAULTS=faults, **one_seed()):
            super().__init__(extra_config, **options)

    def each_rank(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """By rank."""
        return self.core.model_executor.collective_rpc(function, args=args)

    @contextmanager
    def armed(self, text: str) -> Iterator[None]:
        self._arm(text)
        try:
            yield
        finally:
            self._arm("")

    def _arm(self, text: str) -> None:
        shared = self.connector._scheduler._shared
        rules = parse(text) if text else ()
        shared.index.arm(rules)
        if shared.migration is not None:
            shared.migration._client.arm(rules)
        self.each_rank(arm_rank, text)

    def reports(self) -> Reports:
        return Reports(self)

    def assert_workers_idle(self) -> None:
        for state in self.each_rank(rank_state):
            assert (state["pending"], state["loads"], state["swallowed"]) == (0, 0, 0), state


# vLLM's queues to the ranks of engines that were closed. Older vLLM leaves their sockets open, and when those are
# garbage pyzmq waits for ever for somebody to close them, in whatever test the collector happens to run.
_queues: list[Any] = []


class ParallelEngine(FaultyEngine):
    """Several ranks, each in a process. Its GPU cache is poisoned when it is dropped."""

    def __init__(self, extra_config: dict[str, Any], faults: str, **options: Any) -> None:
        # One core for each of two ranks; vLLM's own binding wants a NUMA node for each.
        with environment(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1"):
            super().__init__(extra_config, faults, poison=False, **options)

    def close(self) -> None:
        executor = self.core.model_executor
        _queues.extend([executor.rpc_broadcast_mq, *executor.response_mqs])
        super().close()

    def drop_gpu_cache(self) -> None:
        super().drop_gpu_cache()
        self.each_rank(poison_rank)
