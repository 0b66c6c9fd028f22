# SPDX-License-Identifier: Apache-2.0
"""`pega doctor`: what this machine has of what the connector needs. Each check says what was found, what that
means and how to mend it. The checks are in `doctor_checks.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import doctor_checks as of
from .address import HostPort
from .config import ConfigError
from .doctor_checks import Check
from .gpu import ask_driver


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and say how to mend what is missing",
        description="Checks vLLM, driver, memory, CuPy, Mooncake and ports. Exits 1 if something fails, else 0.",
        allow_abbrev=False,
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="also try to bind what migration.listen will be")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="doctor")


def run(args: Any) -> int:
    listen = None
    if args.listen:
        try:
            listen = HostPort.parse(args.listen)
        except ValueError as error:
            raise ConfigError([f'--listen: got "{args.listen}" ({error}); allowed: host:port']) from None
    checks = list(examine(listen))
    if args.json:
        worst = max((check.status for check in checks), key=("ok", "warn", "fail").index)
        print(json.dumps({"status": worst, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _show(checks)
    return 1 if any(check.status == "fail" for check in checks) else 0


def examine(listen: HostPort | None = None) -> Iterator[Check]:
    driver = ask_driver()
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("vLLM", of.check_vllm),
        ("native module", of.check_native),
        ("GPU", lambda: of.check_gpu(driver)),
        ("copy kernels", lambda: of.check_kernels(driver)),
        ("memory", of.check_memory),
        ("pinned memory", lambda: of.check_memlock(driver)),
        ("NUMA", lambda: of.check_numa(driver)),
        ("Mooncake", lambda: of.check_mooncake(driver)),
        ("RDMA", of.check_rdma),
        ("ports", lambda: of.check_ports(listen)),
    ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # one check that cannot be made must not hide the others
            yield Check(name, "warn", f"could not be checked: {type(error).__name__}: {error}")


def _show(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        table.add_row(Text(check.status, style=styles[check.status]), Text(check.name), Text(check.found))
        if check.means:
            table.add_row("", "", Text(f"means: {check.means}"))
        if check.mend:
            table.add_row("", "", Text(f"mend:  {check.mend}"))
    Console(soft_wrap=not sys.stdout.isatty()).print(table)
