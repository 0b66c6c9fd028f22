# SPDX-License-Identifier: Apache-2.0
"""Does operations on a real engine in this process and checks everything that can be seen. One process, one model.

    python -m tests.soak.player JOB.json DESCRIPTOR

Progress goes to the descriptor as lines of JSON, one a check, and at the end {"failed": ...} or {"over": true}.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import msgspec

from tests.soak import operations as ops
from tests.soak.process import Growth, Sample, fair_seconds
from tests.soak.seam import Seam

REQUEST_S = 120.0  # a request of some 100 tokens; one takes a second or two here
REFERENCE_S = 1800
# Two tokens whose log-probabilities are nearer are a tie: float32 sums in another order, as another batch makes them.
TIE = 1e-3
MAX_TIES = 0.02  # of all requests: more are no coincidence


class Job(msgspec.Struct):
    """What the process is started for."""

    seed: str
    model: str  # layers, as in windowed_model_path; "" = all full
    fault_rate: float
    seconds: float = 0.0  # of operations from the seed; 0: those of `replay`
    replay: str = ""
    journal: str = ""  # where they are written down before they are done


class Failure(Exception):
    """`kind`: a word by which a replay is compared."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Player:
    def __init__(self, job: Job, out: TextIO) -> None:
        from tests.serving.engine import Reference, model_path, windowed_model_path

        self._job = job
        self._out = out
        self._model = windowed_model_path(70, job.model) if job.model else model_path()
        self._reference = Reference(self._model, keep=False)
        # vLLM alone answers in its own process, meanwhile; its answers are compared one check later.
        self._beside = ThreadPoolExecutor(1)
        self._unchecked: list[tuple[list[Any], Future[dict[str, list[int]]]]] = []
        self._engine: Any = None
        self._growth = Growth()
        self._names: dict[int, str] = {}  # of the round's requests: vLLM's id
        self._since: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def play(self, items: Iterable[ops.Operation]) -> None:
        for item in items:
            self._do(item)
        if self._engine is not None:
            self._check(ops.Check(""))
            self._compare(all_of_them=True)
            self._end()

    def _do(self, item: ops.Operation) -> None:
        if isinstance(item, ops.Start):
            self._start(item)
        elif self._engine is None:
            return  # a shrunk list without a start
        elif isinstance(item, ops.Add):
            self._add(item)
        elif isinstance(item, ops.Step):
            self._step()
        elif isinstance(item, ops.Abort):
            self._abort(item.id)
        elif isinstance(item, ops.Reset):
            self._engine.engine.reset_prefix_cache(reset_connector=item.connector)
        else:
            self._check(item)

    # --- engines ---

    def _start(self, start: ops.Start) -> None:
        from tests.serving.engine import Engine

        if self._engine is not None:
            self._check(ops.Check(""))
            self._compare(all_of_them=True)
            self._end()
        pool = {"host_pool_gib": (start.host_blocks + 0.5) * BLOCK_BYTES / 2**30}
        config = {**pool, "transfer_timeout_s": 10, **start.config}
        options = dict(start.options)
        if len(set(self._job.model)) > 1:  # three groups share the blocks; vLLM refuses to start with too few for all
            options["num_gpu_blocks_override"] = max(96, options["num_gpu_blocks_override"])
        self._engine = engine = Engine(config, model=self._model, **options)
        self._growth = Growth()
        self.counts["engines"] += 1
        worker = engine.worker_connector._worker
        seed = f"{self._job.seed} {self.counts['engines']}"
        worker._engine = Seam(worker._engine, self._job.fault_rate, seed, self.counts)
        preempt = engine.scheduler._preempt_request

        def preempt_request(*args: Any, **kwargs: Any) -> Any:
            self.counts["preempted"] += 1
            return preempt(*args, **kwargs)

        engine.scheduler._preempt_request = preempt_request

    def _end(self) -> None:
        self._engine.close()
        self._engine = None
        gc.collect()

    # --- requests ---

    def _add(self, add: ops.Add) -> None:
        from tests.serving.engine import Ask

        before = ops.tokens(*add.stem)
        if add.after in self._names:
            run = self._engine.requests[self._names[add.after]]
            if len(run.ask.prompt) + len(run.tokens) + add.tail[1] <= ops.MAX_PROMPT:
                before = (*run.ask.prompt, *run.tokens)
        ask = Ask((*before, *ops.tokens(*add.tail)), add.tokens, pega=tuple(add.pega.items()))
        self._names[add.id] = name = self._engine.add(ask)
        self._since[name] = fair_seconds()
        self.counts["requests"] += 1

    def _abort(self, number: int) -> None:
        name = self._names.get(number, "")
        if name and not self._engine.requests[name].finished and not self._engine.requests[name].aborted:
            self._engine.abort(name)
            self.counts["aborted"] += 1

    def _step(self) -> None:
        self._engine.step()
        for name, since in list(self._since.items()):
            run = self._engine.requests[name]
            if run.finished or run.aborted:
                del self._since[name]
            elif fair_seconds() - since > REQUEST_S:
                raise Failure("hang", f"request {name} is not finished after {REQUEST_S:g} s: {self._engine.counts()}")

    # --- checks ---

    def _check(self, check: ops.Check) -> None:
        engine = self._engine
        deadline = fair_seconds() + 2 * REQUEST_S
        while engine.engine.has_unfinished_requests() or engine.scheduler.has_requests():
            self._step()
            if fair_seconds() > deadline:
                raise Failure("hang", f"not quiet: {engine.counts()}")
        try:
            engine.assert_idle()
        except AssertionError as error:
            raise Failure("not idle", str(error)) from None
        runs = list(engine.requests.values())
        if runs:
            self._unchecked.append((runs, self._beside.submit(self._reference, [run.ask for run in runs])))
        engine.requests.clear()
        self._names.clear()
        self._since.clear()
        self.counts["checks"] += 1
        if check.forget and not engine.engine.reset_prefix_cache(reset_connector=check.forget == "all"):
            raise Failure("not idle", "blocks are held by nobody: the prefix cache cannot be reset")
        self._compare()
        self.counts["hit tokens"] += engine.hit_tokens
        engine.hit_tokens = 0
        sample = Sample.now()
        self._tell({"counts": dict(self.counts), "process": asdict(sample), "slots": engine.counts()})
        if grown := self._growth.add(sample):
            raise Failure("leak", "; ".join(grown))

    def _compare(self, all_of_them: bool = False) -> None:
        while len(self._unchecked) > (0 if all_of_them else 1):
            runs, answers = self._unchecked.pop(0)
            expected = self._await(answers)
            for run in runs:
                self._same(run, expected[run.ask.key])

    def _await(self, answers: Future[dict[str, list[int]]]) -> dict[str, list[int]]:
        """vLLM's own slowness on a busy machine is no hang of ours: the parent is told that we wait."""
        for _ in range(REFERENCE_S // 20):
            try:
                return answers.result(timeout=20)
            except FuturesTimeout:
                self._tell({"waits": "for vLLM alone"})
        raise Failure("reference", f"vLLM alone did not answer within {REFERENCE_S} s")

    def _same(self, run: Any, expected: list[int]) -> None:
        self.counts["tokens compared"] += len(run.tokens)
        wanted = expected[: len(run.tokens)] if run.aborted else expected
        if run.tokens == wanted:
            return
        pairs = zip(run.tokens, wanted, strict=False)
        at = next((i for i, (got, want) in enumerate(pairs) if got != want), min(len(run.tokens), len(wanted)))
        where = f"prompt of {len(run.ask.prompt)} tokens, token {at} of {len(run.tokens)}, {dict(run.ask.pega)}"
        if at < len(run.tokens):
            likely = self._beside.submit(self._reference.likely, (*run.ask.prompt, *wanted[:at])).result()
            gap = likely[wanted[at]] - likely.get(run.tokens[at], -99.0)
            self.counts["ties"] += 1
            if gap <= TIE and self.counts["ties"] <= 3 + MAX_TIES * self.counts["requests"]:
                return
            where += f": {run.tokens[at]} instead of {wanted[at]}, log-probabilities {gap:.3g} apart"
        raise Failure("wrong token", where)

    def _tell(self, what: dict[str, Any]) -> None:
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()


BLOCK_BYTES = 3 * 2 * 32 * 2 * 4 * 32  # layers x KV heads x head size x (K, V) x float32 x tokens


def from_seed(job: Job) -> Iterator[ops.Operation]:
    """Ends after a check, once the time is over."""
    end = time.monotonic() + job.seconds
    over = False
    for item in ops.operations(job.seed):
        if over and not isinstance(item, ops.Check):
            continue
        yield item
        over = time.monotonic() > end
        if over and isinstance(item, ops.Check):
            return


def noted(items: Iterable[ops.Operation], journal: str) -> Iterator[ops.Operation]:
    with open(journal, "wb") as file:
        for item in items:
            file.write(ops.line(item))
            file.flush()
            yield item


def main(job_file: str, descriptor: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks where a hung process is
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    items: Iterable[ops.Operation] = ops.read(Path(job.replay)) if job.replay else from_seed(job)
    if job.journal:
        items = noted(items, job.journal)
    with os.fdopen(int(descriptor), "w") as out:
        try:
            Player(job, out).play(items)
        except Failure as failure:
            end = {"failed": failure.kind, "why": str(failure)}
        except Exception as error:
            end = {"failed": type(error).__name__, "why": traceback.format_exc()}
        else:
            end = {"over": True}
        out.write(json.dumps(end) + "\n")
        out.flush()
        os._exit("failed" in end)  # an engine that failed may not shut down


if __name__ == "__main__":
    main(*sys.argv[1:])
