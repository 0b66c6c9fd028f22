# SPDX-License-Identifier: Apache-2.0
"""No exception of ours reaches vLLM, and no log line repeats without end."""

from __future__ import annotations

import logging

import pytest

from vllm_pega_connector import guard
from vllm_pega_connector.guard import RateLimitedLog, guarded


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, periods and a logger of their own: other tests assert that the process has had no fault, and where vLLM
    is imported, it keeps its loggers' lines to itself."""
    monkeypatch.setattr(guard, "faults", 0)
    monkeypatch.setattr(guard, "logger", logging.getLogger("guard-under-test"))
    monkeypatch.setattr(guard, "log_limited", RateLimitedLog())


def test_an_exception_becomes_the_default_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    @guarded(lambda: (0, False))
    def hook(a: int, *, b: int) -> tuple[int, bool]:
        """What it says."""
        return (1 // (a - b), True)

    assert hook(3, b=2) == (1, True)
    assert guard.faults == 0 and not caplog.records
    assert hook(2, b=2) == (0, False)
    assert guard.faults == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "hook failed" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
    assert (hook.__name__, hook.__doc__) == ("hook", "What it says.")


def test_each_default_is_its_own() -> None:
    @guarded(set)
    def hook() -> set[int]:
        raise RuntimeError

    assert hook() == set() and hook() is not hook()


def test_an_interrupt_is_none_of_ours() -> None:
    @guarded(lambda: None)
    def hook() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook()
    assert guard.faults == 0


def test_a_hook_that_fails_each_step_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    @guarded(lambda: None)
    def hook() -> None:
        raise RuntimeError

    for _ in range(1000):
        hook()
    assert guard.faults == 1000 and len(caplog.records) == 1


def test_rate_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(guard.time, "monotonic", lambda: now)
    log = RateLimitedLog(period_s=30)
    for now in (100.0, 101.0, 129.9):
        log("save", "failed: %s", now)
    log("load", "another kind has its own period")
    assert [r.getMessage() for r in caplog.records] == ["failed: 100.0", "another kind has its own period"]
    caplog.clear()
    now = 130.0
    log("save", "failed: %s", now)
    now = 200.0
    log("save", "failed: %s", now)
    assert [r.getMessage() for r in caplog.records] == [
        "failed: 130.0 (2 more like it in the last 30 s)",
        "failed: 200.0",
    ]


def test_percent_signs_in_a_message_survive(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(period_s=0)
    log("kind", "no arguments: 100%")
    log("kind", "one: %s", "50%")
    assert [r.getMessage() for r in caplog.records] == ["no arguments: 100%", "one: 50%"]
