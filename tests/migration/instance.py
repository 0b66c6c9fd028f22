# SPDX-License-Identifier: Apache-2.0
"""A real vLLM instance in a process of its own, told what to do line by line: the source of migrations.

Run as `python -m tests.migration.instance`: reads JSON lines from standard input, answers on the descriptor that it
was given.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from tests.support.line_process import ROOT, LineProcess

# Through the C API and without giving up the GIL: what a long forward pass does to the threads of its process.
HOLD_GIL = "import ctypes; ctypes.PyDLL(None).usleep(int({seconds} * 1e6))"


class VllmInstance(LineProcess):
    """The other process, from outside. `extra` is its kv_connector_extra_config."""

    def __init__(self, extra: dict[str, Any], **options: Any) -> None:
        def command(answers: str) -> list[str]:
            module = [sys.executable, "-m", "tests.migration.instance"]
            return [*module, answers, json.dumps(extra), json.dumps(options)]

        super().__init__(command, {"PYTHONPATH": str(ROOT)})


def main(answers: str, extra: str, options: str) -> None:
    from tests.serving.engine import Ask, Engine

    engine = Engine(json.loads(extra), **json.loads(options))
    migration = engine.connector._scheduler._migration

    def ready() -> str:
        while not migration.port:
            migration.poll()
        return str(migration.port)

    def run(prompt: list[int], tokens: int, source: str = "") -> dict[str, Any]:
        with engine.watch() as seen:
            (request,) = engine.run([Ask(tuple(prompt), tokens, (("source", source),) if source else ())])
        return {"tokens": request.tokens, "params": request.params, "hits": seen.hit_tokens}

    def hold_gil(seconds: float) -> str:
        def hold() -> None:
            exec(HOLD_GIL.format(seconds=seconds))

        threading.Timer(0.05, hold).start()
        return "soon"

    commands = {
        "ready": ready,
        "run": run,
        "hold_gil": hold_gil,
        "agent": lambda: migration._client.pid,
        "counts": engine.counts,
        "forget": engine.forget_all,
    }
    with os.fdopen(int(answers), "w") as out:
        for line in sys.stdin:
            command, *args = json.loads(line)
            out.write(json.dumps(commands[command](*args)) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
