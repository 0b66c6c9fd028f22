# SPDX-License-Identifier: Apache-2.0
"""A process of its own that is told what to do by lines of JSON, and answers on a pipe that it is given.

Its standard output stays free for whatever the libraries in it print.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class LineProcess:
    """`command` gets the answers' descriptor as text. `tell` sends, `answer` waits, `ask` does both."""

    def __init__(self, command: Callable[[str], list[str]], environment: Mapping[str, str], stdout: Any = None) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            command(str(write)), cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=stdout,
            pass_fds=[write], text=True,
        )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read)

    def tell(self, command: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Raises EOFError when the process has ended."""
        line = self._answers.readline()
        if not line:
            raise EOFError("the instance ended; its output says why")
        return json.loads(line)

    def ask(self, command: str, *args: Any) -> Any:
        self.tell(command, *args)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
