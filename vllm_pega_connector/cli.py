# SPDX-License-Identifier: Apache-2.0
"""The command `pega`. It never imports vLLM.

Exit status: 0 done, 1 a check failed, 2 bad input (said in one line a problem), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import cli_agent, cli_calibrate, cli_config, cli_explain, doctor
from .config import ConfigError

# Modules with `add_parser(subparsers)`, which sets `run(args) -> exit status` as the parser's default.
COMMANDS = (cli_explain, cli_calibrate, cli_config, doctor, cli_agent)


class _Parser(argparse.ArgumentParser):
    """One line for bad input; argparse would print the usage as well."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _version() -> str:
    try:
        return importlib.metadata.version("vllm-pega-connector")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pega",
        description="Tools of vllm-pega-connector: what Auto decides and why, settings, the state of this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pega {_version()}")
    subparsers: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status. Bad arguments raise SystemExit(2), as argparse does."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        for problem in error.problems:
            print(f"pega {args.command}: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # a fault of ours, and still no traceback for someone who asked a question
        print(f"pega {args.command}: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
