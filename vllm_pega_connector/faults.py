# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, for tests: the rules that VLLM_PEGA_FAULTS gives, and the few seams where they act.

Rules are separated by ";", each an action, its target and, in any order, key=value:

    fail|delay|duplicate job, fail|delay chunk, kill engine, fill pool, kill agent
    direction=load|save   rank=TENSOR or PIPELINE.TENSOR   nth=N or p=PROBABILITY [seed=N]   ms=DELAY

For example "fail chunk direction=load nth=3; delay job rank=1 ms=200 p=0.1 seed=7". Without nth and p a rule acts every
time. `docs/contributing.md` says what each of them does. Release builds lack the native part and refuse the variable.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pega_connector.config import ConfigError
from vllm_pega_connector.config_text import FAULTS_VARIABLE, show
from vllm_pega_connector.guard import logger

_TRIGGER = ("nth", "p", "seed")
_WORKER = ("direction", "rank", *_TRIGGER)
KINDS: dict[str, tuple[str, ...]] = {
    "fail job": _WORKER,
    "delay job": (*_WORKER, "ms"),
    "duplicate job": _WORKER,
    "fail chunk": _WORKER,
    "delay chunk": (*_WORKER, "ms"),
    "kill engine": _WORKER,
    "fill pool": _TRIGGER,
    "kill agent": _TRIGGER,
}


@dataclass(frozen=True)
class Rule:
    """nth: the occasion, from 1, at which it acts; 0: each with probability `p`. Occasions are counted per rule and
    rank, among those of its direction."""

    action: str
    target: str
    direction: str = ""  # both
    rank: tuple[int, int] | None = None  # (pipeline rank, tensor rank), None = all
    nth: int = 0
    p: float = 1.0
    seed: int = 0
    ms: float = 0.0

    def on(self, rank: tuple[int, int]) -> bool:
        return self.rank is None or self.rank == rank


# --- the text ---


def _direction(text: str) -> str:
    if text not in ("load", "save"):
        raise ValueError
    return text


def _rank(text: str) -> tuple[int, int]:
    pipeline, _, tensor = text.rpartition(".")
    return _number(pipeline or "0"), _number(tensor)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _within(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    "direction": (_direction, "load or save"),
    "rank": (_rank, "a tensor rank, or PIPELINE.TENSOR"),
    "nth": (lambda text: int(_within(1, 1 << 53)(str(_number(text)))), "a whole number, 1 or more"),
    "p": (_within(0, 1), "a probability, 0 to 1"),
    "seed": (lambda text: int(_within(0, 1 << 53)(str(_number(text)))), "a whole number, 0 or more"),
    "ms": (_within(0, 600_000), "milliseconds, 0 to 600000"),
}


def parse(text: str) -> tuple[Rule, ...]:
    """Raises ConfigError with every rule that is wrong, what was given and what is allowed."""
    rules, wrong = [], []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        try:
            rules.append(_rule(part))
        except ValueError as error:
            wrong.append(f"{FAULTS_VARIABLE}: got {show(part)}; {error}")
    if not rules and not wrong:
        wrong.append(f"{FAULTS_VARIABLE}: got {show(text)}; allowed: {', '.join(KINDS)}")
    if wrong:
        raise ConfigError(wrong)
    return tuple(rules)


def _rule(text: str) -> Rule:
    kind, settings = " ".join(text.split()[:2]), text.split()[2:]
    allowed = KINDS.get(kind)
    if allowed is None:
        raise ValueError(f"allowed: {', '.join(KINDS)}")
    action, target = kind.split()
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in allowed or key in values:
            raise ValueError(f"{show(setting)} is not one of its settings, once each; allowed: {', '.join(allowed)}")
        read, says = _READ[key]
        try:
            values[key] = read(value)
        except ValueError:
            raise ValueError(f"{key} is {show(value)}; allowed: {says}") from None
    if "ms" in allowed and "ms" not in values:
        raise ValueError(f"ms is missing; allowed: {_READ['ms'][1]}")
    if "nth" in values and "p" in values:
        raise ValueError("nth and p exclude each other; allowed: one of them")
    return Rule(action, target, **values)


# --- when ---


class Trigger:
    """A rule that is armed: counts its occasions."""

    def __init__(self, rule: Rule, who: object) -> None:
        self.rule = rule
        self._seen = 0
        self._random = random.Random(f"{rule.seed}/{who}")  # ranks draw apart, and each run alike

    def fires(self, direction: str = "") -> bool:
        if self.rule.direction and direction != self.rule.direction:
            return False
        self._seen += 1
        return self._seen == self.rule.nth if self.rule.nth else self._random.random() < self.rule.p


def _armed(rules: Sequence[Rule], target: str, who: object) -> list[Trigger]:
    return [Trigger(rule, who) for rule in rules if rule.target == target]


# --- where ---


@dataclass(frozen=True)
class Faults:
    """What is to go wrong in this process. Without rules everything is handed back as it came."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Faults:
        """Raises ConfigError when the variable is wrong, or set where this build cannot do it."""
        text = env.get(FAULTS_VARIABLE, "")
        if not text:
            return cls()
        if not built():
            raise ConfigError(
                [
                    f"{FAULTS_VARIABLE}: got {show(text)}; a release build injects no faults: unset it, or build with "
                    "-C cmake.define.PEGA_FAULTS=ON"
                ]
            )
        return cls(parse(text))

    def device(self, device: Any, rank: tuple[int, int]) -> Any:
        if not self.rules:
            return device
        from vllm_pega_connector import _native

        return _native.FaultDevice(device, _chunk_rows(self.rules, rank))

    def engine(self, engine: Any, device: Any, rank: tuple[int, int]) -> Any:
        if not self.rules:
            return engine
        logger.warning("PegaConnector injects faults on rank %s: %s", rank, self.rules)
        return FaultyEngine(engine, device, rank, self.rules)

    def scheduler(self, scheduler: Any) -> Any:
        """Its index is made when the workers' pools are known, so that is when it is wrapped."""
        if not self.rules:
            return scheduler
        set_workers = scheduler.set_workers

        def set_workers_and_wrap(handshakes: Any) -> None:
            set_workers(handshakes)
            shared = scheduler._shared
            if shared.index is None or isinstance(shared.index, FaultyIndex):
                return
            shared.index = FaultyIndex(shared.index, shared.key_bytes, self.rules)
            if shared.migration is not None:
                shared.migration._index = shared.index
                shared.migration._client = FaultyAgent(shared.migration._client, self.rules)

        scheduler.set_workers = set_workers_and_wrap
        return scheduler


NO_FAULTS = Faults()


def built() -> bool:
    from vllm_pega_connector import _native

    return hasattr(_native, "FaultDevice")


def _chunk_rows(rules: Sequence[Rule], rank: tuple[int, int]) -> list[tuple[str, str, int, float, int, float]]:
    """Chunks and the engine's thread are the native device's."""
    return [
        (r.action, r.direction, r.nth, r.p, hash((r.seed, rank)) & (1 << 53) - 1, r.ms)
        for r in rules
        if r.target in ("chunk", "engine") and r.on(rank)
    ]


class _Wrapper:
    """Everything that is not overridden is the wrapped object's."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@dataclass
class _Late:
    result: Any
    due: float


@dataclass
class _Plan:
    """What is to happen to a job's report."""

    delay_s: float = 0.0
    copies: int = field(default=1)


class FaultyEngine(_Wrapper):
    def __init__(self, engine: Any, device: Any, rank: tuple[int, int], rules: Sequence[Rule]) -> None:
        super().__init__(engine)
        self._device, self._rank = device, rank
        self._plans: dict[int, _Plan] = {}
        self._late: list[_Late] = []
        self.arm(rules)

    def arm(self, rules: Sequence[Rule]) -> None:
        """From now on these rules, counted from here."""
        self._jobs = _armed([r for r in rules if r.on(self._rank)], "job", self._rank)
        self._device.arm(_chunk_rows(rules, self._rank))

    def submit(self, job_id: int, direction: str, *args: Any, **options: Any) -> bool:
        plan = _Plan()
        # All of them count this job, whichever acts.
        for rule in [t.rule for t in self._jobs if t.fires(direction)]:
            if rule.action == "fail":
                raise RuntimeError("injected fault")
            if rule.action == "delay":
                plan.delay_s += rule.ms / 1000
            else:
                plan.copies += 1
        taken: bool = self._wrapped.submit(job_id, direction, *args, **options)
        if taken:
            self._plans[job_id] = plan
        return taken

    def poll(self) -> list[Any]:
        now = time.monotonic()
        for result in self._wrapped.poll():
            plan = self._plans.pop(result.job_id)
            self._late += [_Late(result, now + plan.delay_s)] * plan.copies
        due = [late.result for late in self._late if late.due <= now]
        self._late = [late for late in self._late if late.due > now]
        return due

    @property
    def pending(self) -> int:
        return self._wrapped.pending + len(self._late)


class FaultyIndex(_Wrapper):
    def __init__(self, index: Any, key_bytes: int, rules: Sequence[Rule]) -> None:
        super().__init__(index)
        self._key_bytes = key_bytes
        self.arm(rules)

    def arm(self, rules: Sequence[Rule]) -> None:
        self._full = _armed(rules, "pool", "scheduler")

    def reserve(self, group: int, keys: bytes, *near: int) -> bytes:
        if any([t.fires() for t in self._full]):
            none: int = self._wrapped.NO_SLOT
            return none.to_bytes(4, "little") * (len(keys) // self._key_bytes)
        slots: bytes = self._wrapped.reserve(group, keys, *near)
        return slots


class FaultyAgent(_Wrapper):
    def __init__(self, client: Any, rules: Sequence[Rule]) -> None:
        super().__init__(client)
        self.arm(rules)

    def arm(self, rules: Sequence[Rule]) -> None:
        self._kills = _armed(rules, "agent", "scheduler")

    def post(self, pull: Any) -> bool:
        taken: bool = self._wrapped.post(pull)
        if any([t.fires() for t in self._kills]):
            self._wrapped.kill()
        return taken
