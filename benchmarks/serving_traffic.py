# SPDX-License-Identifier: Apache-2.0
"""Decode latency beside real traffic: vLLM without a connector, with ours, and with vLLM's own.

1 and 8 decode streams run while another request arrives every 0.3 s: a known prompt whose KV is in host memory and no
longer on the GPU (load), or a new one that gets saved (store). Before and after, in the same engine, the same streams
run alone: that is each run's baseline, and its spread is the noise. Then time to first token (cold, GPU hit, host hit)
and a store-heavy batch. Every connector gets the same requests, in a process of its own: vLLM keeps one a process.

    python benchmarks/serving_traffic.py --json traffic.json --markdown traffic.md --plot traffic.png
    python benchmarks/serving_traffic.py --connectors none pega --repeats 1 --events 8 --phases load1 store1   # short
    python benchmarks/serving_traffic.py --tiny --connectors none pega                                         # on CPU

* excess: the sum of (gap - median gap) over gaps above 10 ms, per event and stream: what one event costs each stream.
* hit rate: tokens that the connector brought / tokens of the side requests. A run whose connector brought none is VOID.
* stored: of prompts saved in the phase, the share of tokens that the connector gives back afterwards. Whoever drops
  saves disturbs nobody, so look here first.
* load GiB/s: bytes / seconds of the transfers themselves, from the connector's statistics, where it has any.

OffloadingConnector keeps its tier in /dev/shm; make that large enough (mount -o remount,size=60G /dev/shm).
LMCache and PegaFlow are not compared: neither can be installed beside vLLM 0.26 on the GPU host, which has no network.
The JSON is written after every phase, so that a killed run keeps what it measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serving_report import SESSIONS, markdown, plot
from serving_traffic_engine import TINY, Engine, Sizes
from serving_traffic_phases import measure

PHASES = (*SESSIONS, "ttft", "throughput")
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Setup:
    connector: str | None
    extra: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


# vLLM 0.26 has block-outermost KV only under the V1 model runner: hence baselines under it.
SETUPS = {
    "none": Setup(None),
    "none-v1": Setup(None, environment=V1_RUNNER),
    "pega": Setup("PegaConnector"),
    "pega-throughput": Setup("PegaConnector", {"objective": "throughput"}),
    "pega-tail": Setup("PegaConnector", {"objective": "tail"}),
    "pega-strict": Setup("PegaConnector", {"objective": "strict"}),
    "pega-memcpy": Setup("PegaConnector", {"load_policy": "memcpy", "save_policy": "memcpy"}),
    "pega-v1": Setup("PegaConnector", environment=V1_RUNNER),
    "pega-block": Setup("PegaConnector", {"kv_layout": "block"}, V1_RUNNER),
    "offloading": Setup("OffloadingConnector"),
    "offloading-v1": Setup("OffloadingConnector", environment=V1_RUNNER),
    "simple": Setup("SimpleCPUOffloadConnector"),
}


def kv_transfer(setup: Setup, host_bytes: int) -> dict[str, Any] | None:
    """--kv-transfer-config for a setup, with the same host memory for every connector."""
    if setup.connector is None:
        return None
    if setup.connector != "PegaConnector":
        extra = {"cpu_bytes_to_use": host_bytes, **setup.extra}
        return {"kv_connector": setup.connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "PegaConnector",
        "kv_connector_module_path": "vllm_pega_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_pool_gib": host_bytes / 2**30, **setup.extra},
    }


def measure_one(name: str, args: argparse.Namespace) -> None:
    """All phases of one connector, in this process; written to the document as they come."""
    sizes = TINY if args.tiny else Sizes()
    transfer = kv_transfer(setups(args)[name], sizes.host_bytes)
    engine = Engine(args.model, sizes, transfer)
    found: dict[str, Any] = {**engine.facts, "kv_transfer": transfer}
    print(f"{name}: engine up after {engine.facts['engine_start_s']:.1f} s", flush=True)

    def note(key: str, value: Any) -> None:
        found[key] = value
        document = read(args.json)
        document["connectors"][name] = found
        document |= {key: engine.facts[key] for key in ("vllm", "device")}
        write(args.json, document)

    measure(engine, args.phases, args.events, args.repeats, note)
    engine.close()


def setups(args: argparse.Namespace) -> dict[str, Setup]:
    """The named ones and those of --set, which are ours with other options."""
    own = {}
    for text in args.set:
        name, _, extra = text.partition("=")
        try:
            own[name] = Setup("PegaConnector", json.loads(extra))
        except ValueError:
            raise SystemExit(
                f'--set {text}: not NAME=JSON; for example --set \'slow={{"objective": "tail"}}\''
            ) from None
    return {**SETUPS, **own}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, document: dict[str, Any]) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(document, indent=1))
    scratch.rename(path)


def run(name: str, setup: Setup, args: argparse.Namespace) -> str:
    """Measures one connector in a process of its own; the answer says what went wrong."""
    need = (TINY if args.tiny else Sizes()).host_bytes
    if setup.connector == "OffloadingConnector" and shutil.disk_usage("/dev/shm").free < need:
        return f"/dev/shm has less than {need / 1e9:.0f} GB free; mount -o remount,size={need // 10**9 + 20}G /dev/shm"
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name, "--json", str(args.json)]
    log = args.json.with_name(f"{args.json.stem}-{name}.log")
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, env={**os.environ, **setup.environment}, stderr=out, timeout=args.timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done within {args.timeout_s} s (--timeout-s); {log} has its log"
    return f"ended with code {done.returncode}; {log} says why" if done.returncode else ""


def report(document: dict[str, Any], args: argparse.Namespace) -> None:
    print(markdown(document))
    if args.markdown:
        args.markdown.write_text(markdown(document))
    if args.plot:
        plot(document, args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name in benchmarks/shapes.py, or a path; default: qwen3-4b, or tiny")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on CPU")
    parser.add_argument("--connectors", nargs="+", default=["none", "pega", "offloading", "simple"],
                        help=f"in this order, of: {', '.join(SETUPS)}, and those of --set")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="ours with these options")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--events", type=int, default=10, help="requests beside the streams, per repeat")
    parser.add_argument("--timeout-s", type=float, default=300, help="per connector")
    parser.add_argument("--json", type=Path, default=Path("serving-traffic.json"))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--report", action="store_true", help="measure nothing; tables and plot of the --json file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = args.model or ("tiny" if args.tiny else "qwen3-4b")
    if args.child:
        measure_one(args.child, args)
        os._exit(0)  # interpreters that held an engine take their time to end
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib; leave it out, and draw the plot elsewhere with --report")
    if args.report:
        report(read(args.json), args)
        return
    known = setups(args)
    if unknown := [name for name in args.connectors if name not in known]:
        parser.error(f"--connectors {' '.join(unknown)}: not among {', '.join(known)}")
    options = {k: str(v) for k, v in vars(args).items() if k not in ("json", "markdown", "plot", "report", "child")}
    sizes = asdict(TINY if args.tiny else Sizes())
    write(args.json, {"options": options, "sizes": sizes, "host": platform.platform(), "vllm": "?", "device": "?",
                      "connectors": {}})  # fmt: skip
    for name in args.connectors:
        began = time.perf_counter()
        problem = run(name, known[name], args)
        document = read(args.json)
        document["connectors"].setdefault(name, {})["wall_s"] = round(time.perf_counter() - began, 1)
        if problem:
            document["connectors"][name]["error"] = problem
            print(f"{name}: {problem}", file=sys.stderr)
        write(args.json, document)
        if args.markdown:
            args.markdown.write_text(markdown(document))
    report(document, args)
    voids = [f"{name}, {phase}" for name, found in document["connectors"].items() for phase in SESSIONS
             if found.get(phase, {}).get("void")]  # fmt: skip
    if voids or any("error" in found for found in document["connectors"].values()):
        sys.exit("not everything was measured: see VOID and the last lines above")


if __name__ == "__main__":
    main()
