# SPDX-License-Identifier: Apache-2.0
"""`pega explain`: what Auto would choose for a transfer, and why; the same code as in the engine."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any, get_args

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import cli_running
from .config import BackendName, ConfigError, Direction, ObjectiveName, PegaConfig, PolicyConfig
from .decisions import size
from .gpu import gpu_name
from .model_shape import DTYPE_BYTES, block_shape, read_model_config
from .profile import built_in_names, load_profile

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
          "kib": 2**10, "mib": 2**20, "gib": 2**30}  # fmt: skip
FIELDS = ("backend", "max_grid_blocks", "chunk_descriptors", "chunk_bytes", "inflight_chunks", "spread_us", "reason")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 2**40:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an integer from 1 to 2^40")
    return int(text)


def _bytes(text: str) -> int:
    """A size: "4096", "4KiB", "2.25 MiB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.lower())
    size = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0
    if not 1 <= size <= 2**40 or size != int(size):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: whole bytes from 1 to 1024GiB, as 4096 or 4KiB")
    return int(size)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="what Auto would choose for a transfer, and why",
        description="Shows the decision of the Auto policy for one transfer, given as ranges (after merging) or as "
        "blocks of a model. Times and growth of decode p99 are estimates from the device profile.",
        epilog="examples: pega explain --ranges 16384 --range-bytes 4KiB --profile rtx5090 --objective tail; "
        "pega explain --model ./Qwen3-4B/config.json --blocks 512 --tp 4",
        allow_abbrev=False,
    )
    shape = parser.add_argument_group("the transfer")
    shape.add_argument("--ranges", type=_count, metavar="N", help="contiguous ranges")
    shape.add_argument("--range-bytes", type=_bytes, metavar="B", help="size of each, as 4096 or 4KiB")
    shape.add_argument("--alignment", type=int, choices=(1, 2, 4, 8, 16), default=16, help="of addresses and sizes")
    shape.add_argument("--direction", choices=get_args(Direction), default="load", help="default: load")
    model = parser.add_argument_group("or blocks of a model")
    model.add_argument("--model", metavar="PATH", help="its config.json, or the folder of it")
    model.add_argument("--blocks", type=_count, metavar="N", help="KV blocks to move, none adjoining another")
    model.add_argument("--block-size", type=_count, default=16, metavar="TOKENS", help="default: 16")
    model.add_argument("--tp", type=_count, default=1, metavar="N", help="tensor parallel size, default: 1")
    model.add_argument("--dtype", choices=("auto", *DTYPE_BYTES), default="auto", help="of the KV cache")
    model.add_argument(
        "--layout", choices=("vllm", "split", "block"), default="vllm",
        help="vllm: one range a layer (default); split: K and V apart (vLLM 0.25 and older); block: one range a block",
    )  # fmt: skip
    choice = parser.add_argument_group("the choice")
    choice.add_argument("--objective", choices=get_args(ObjectiveName), default="balanced", help="default: balanced")
    choice.add_argument(
        "--profile", default="auto",
        help=f"auto (this machine's, default), {', '.join(built_in_names())}, or a JSON file",
    )  # fmt: skip
    choice.add_argument("--policy", default="auto", help="as load_policy: a backend's name or a JSON object")
    running = parser.add_argument_group("or a running server")
    running.add_argument(
        "--from-metrics", metavar="URL", help="vLLM's address: which backends carried what, and why (by the mean shape)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="explain")


def run(args: Any) -> int:
    if args.from_metrics is not None:
        if args.ranges or args.range_bytes or args.model or args.blocks:
            raise ConfigError(["give either --from-metrics or a transfer"])
        return cli_running.run(args.from_metrics, args.profile, args.json)
    ranges, range_bytes, source = _shape(args)
    if ranges * range_bytes >= 2**60:
        raise ConfigError([f"{ranges} ranges of {range_bytes} bytes are more than 1 EiB in all; give fewer"])
    policy = _policy(args.policy)
    profile = load_profile(args.profile, gpu_name() if args.profile == "auto" else "", "--profile")
    decide = _decider(args.direction, ranges, range_bytes, args.alignment, profile)
    decision = decide(args.objective, policy)
    objectives = {name: decide(name, policy) for name in get_args(ObjectiveName)}
    backends = {name: decide(args.objective, {"backend": name}) for name in get_args(BackendName) if name != "auto"}
    if args.json:
        shape = {"direction": args.direction, "ranges": ranges, "range_bytes": range_bytes,
                 "total_bytes": ranges * range_bytes, "alignment": args.alignment}  # fmt: skip
        answer = {**shape, "profile": profile["name"], "objective": args.objective, **decision,
                  "by_objective": objectives, "by_backend": backends}  # fmt: skip
        print(json.dumps(answer, indent=2))
        return 0
    console = Console(soft_wrap=not sys.stdout.isatty())
    if source:
        console.print(Text(source, style="dim"))
    console.print(Text(decision["reason"], style="bold"))
    console.print(Text(f"{args.direction}, objective {args.objective}, profile {profile['name']}: {_words(decision)}"))
    console.print()
    console.print(_table("objective", objectives, args.objective))
    console.print()
    console.print(_table("if configured", backends, ""))
    return 0


def _shape(args: Any) -> tuple[int, int, str]:
    """(ranges, bytes of each, where they come from)."""
    by_model, by_hand = args.model or args.blocks, args.ranges or args.range_bytes
    if by_model and by_hand:
        raise ConfigError(["give either --ranges and --range-bytes, or --model and --blocks"])
    if args.ranges and args.range_bytes:
        return args.ranges, args.range_bytes, ""
    if args.model and args.blocks:
        shape = block_shape(read_model_config(args.model), args.block_size, args.tp, args.dtype, args.layout)
        ranges = args.blocks * shape.fragments
        text = f"{shape.description}; {args.blocks} blocks of {shape.fragments} x {shape.fragment_bytes} bytes"
        return ranges, shape.fragment_bytes, text
    missing = "--ranges and --range-bytes" if by_hand or not by_model else "--model and --blocks"
    alternative = "" if by_hand or by_model else ", or --model and --blocks"
    raise ConfigError([f"{missing} are both needed{alternative} (see pega explain --help)"])


def _policy(text: str) -> dict[str, Any]:
    """The explicit fields of a policy given as in the configuration."""
    value: Any = text
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError([f"--policy: {text[:60]} is not valid JSON"]) from None
    try:
        config = PegaConfig.from_extra_config({"load_policy": value}, env={})
    except (ConfigError, ValidationError) as error:
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        raise ConfigError([p.replace("load_policy", "--policy", 1) for p in problems]) from None
    return config.load_policy.model_dump(exclude_none=True)


def _decider(direction: str, ranges: int, range_bytes: int, alignment: int, profile: dict[str, Any]) -> Any:
    try:
        from . import _native
    except ImportError as error:
        raise ConfigError([f"the native module is missing ({error}); reinstall vllm-pega-connector"]) from None
    shape = _native.TransferShape(direction, ranges, ranges * range_bytes, range_bytes, range_bytes, alignment)
    native_profile = _native.DeviceProfile(profile)

    def decide(objective: str, policy: dict[str, Any]) -> dict[str, Any]:
        decision = _native.decide(shape, native_profile, objective, PolicyConfig(**policy).to_native())
        return {field: getattr(decision, field) for field in FIELDS}

    return decide


def _words(decision: dict[str, Any]) -> str:
    """What will be done, as a person would say it."""
    ctas = f"at most {decision['max_grid_blocks']} CTAs"
    chunk = f"{decision['chunk_descriptors']} ranges or {size(decision['chunk_bytes'])}"
    flight = f"{decision['inflight_chunks']} in flight, completion awaited"
    if decision["spread_us"]:
        flight += f", spread over {decision['spread_us'] / 1000:g} ms"
    return {
        "memcpy": f"one copy a range, chunks of {chunk}, {flight}",
        "kernel": f"one launch, {ctas}",
        "chunked": f"{ctas}, chunks of {chunk}, {flight}",
        "staged": f"{ctas}, stages of {size(decision['chunk_bytes'])}, {flight}",
    }[decision["backend"]]


def _estimate(decision: dict[str, Any]) -> str:
    """The middle of a reason: time and interference. The transfer stands above the table, the backend beside."""
    text = decision["reason"].split(": ", 1)[-1].removeprefix(decision["backend"]).removeprefix(" as configured")
    return text.strip(",; ").split("; ")[0]


def _table(title: str, decisions: dict[str, dict[str, Any]], marked: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (title, "backend", "CTAs", "in flight", "estimate"):
        table.add_column(column, justify="right" if column == "CTAs" else "left", no_wrap=column != "estimate")
    for name, decision in decisions.items():
        backend, flight = decision["backend"], f"{decision['inflight_chunks']} x "
        if backend == "kernel":
            flight = "one launch"
        elif backend == "chunked":
            flight += f"{decision['chunk_descriptors']} ranges"
        else:
            flight += size(decision["chunk_bytes"])
        ctas = "-" if backend == "memcpy" else str(decision["max_grid_blocks"])
        style = "bold" if name == marked else ""
        table.add_row(name, backend, ctas, flight, Text(_estimate(decision)), style=style)
    return table
