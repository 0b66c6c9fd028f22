# SPDX-License-Identifier: Apache-2.0
"""`pega explain --from-metrics`: what a running server's backends carried, and what Auto says to the mean shape."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .config import ConfigError
from .decisions import size
from .profile import built_in_names, load_profile

TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20
PREFIX = "vllm:pega_"


@dataclass
class Engine:
    """What one engine (data-parallel rank) of the server has counted. Keys of `sums`: name and label values."""

    name: str
    sums: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))
    info: dict[str, str] = field(default_factory=dict)

    def of(self, name: str, *labels: str) -> float:
        return self.sums.get((name, *labels), 0.0)

    def by_label(self, name: str) -> dict[tuple[str, ...], float]:
        """The values of a metric that are not 0."""
        return {key[1:]: value for key, value in self.sums.items() if key[0] == name and value}


def run(url: str, profile_name: str, as_json: bool) -> int:
    url = _address(url)
    engines = _read(_fetch(url))
    if not engines:
        print(
            f"pega explain: {url} has no {PREFIX}* metrics: this vLLM runs without the connector, or with "
            "--disable-log-stats",
            file=sys.stderr,
        )
        return 1
    answers = _answers(engines, profile_name)
    if as_json:
        print(json.dumps({"url": url, "engines": answers}, indent=2))
    else:
        for answer in answers:
            _show(answer)
    return 0


def _address(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError([f"--from-metrics: got {url[:60]!r}; allowed: an http address such as http://localhost:8000"])
    return url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"


def _fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # URLError is an OSError
        why = getattr(error, "reason", None) or error
        raise ConfigError(
            [f"--from-metrics: {url} does not answer ({why}); give the address of a vLLM server"]
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError([f"--from-metrics: {url} answers with more than {MAX_BYTES >> 20} MiB; is it vLLM?"])
    return data.decode(errors="replace")


def _read(text: str) -> list[Engine]:
    """The engines in a page of metrics, in order of their names. Raises ConfigError if it is no such page."""
    found: dict[str, Engine] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except Exception as error:  # the parser raises whatever its splitting ends in
        raise ConfigError([f"--from-metrics: the answer is no page of metrics ({error})"]) from None
    for sample in samples:
        if not sample.name.startswith(PREFIX) or sample.name.endswith(("_bucket", "_created")):
            continue
        name = sample.labels.get("engine", "0")
        engine = found.setdefault(name, Engine(name))
        if sample.name == PREFIX + "info":
            engine.info = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name", "pid")}
            continue
        ours = ("direction", "backend", "reason", "result", "state", "phase")
        labels = tuple(sample.labels[label] for label in ours if label in sample.labels)
        key = (sample.name.removeprefix(PREFIX), *labels)
        engine.sums[key] += sample.value
    return [found[name] for name in sorted(found)]


def _answers(engines: list[Engine], profile_name: str) -> list[dict[str, Any]]:
    """Raises ConfigError."""
    try:
        return [_answer(engine, profile_name) for engine in engines]
    except ConfigError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # The page may come from anything: numbers that are none, labels of another version.
        raise ConfigError(
            [f"--from-metrics: the {PREFIX}* metrics are not those of this version's connector ({error})"]
        ) from None


def _answer(engine: Engine, profile_name: str) -> dict[str, Any]:
    carried = []
    for (direction, backend), count in sorted(engine.by_label("transfers_total").items()):
        nbytes = int(engine.of("transfer_bytes_total", direction, backend))
        ranges = int(engine.of("transfer_ranges_total", direction, backend))
        seconds = engine.of("transfer_seconds_sum", direction, backend)
        queued = engine.of("queue_seconds_sum", direction, backend)
        shape = {"ranges": max(1, round(ranges / count)), "range_bytes": max(1, round(nbytes / max(1, ranges)))}
        carried.append(
            {"direction": direction, "backend": backend, "transfers": int(count), "bytes": nbytes,
             "gib_per_s": round(nbytes / 2**30 / seconds, 3) if seconds else None,
             "mean_queue_ms": round(queued / count * 1e3, 3), "mean_shape": shape,
             "auto": _auto(direction, shape, engine.info, profile_name)}
        )  # fmt: skip
    problems = {name: {" ".join(filter(None, labels)): int(value) for labels, value in engine.by_label(name).items()}
                for name in ("saves_dropped_total", "load_failures_total", "migrations_total", "evictions_total",
                             "ignored_request_params_total", "faults_total")}  # fmt: skip
    pool = {labels[0]: int(value) for labels, value in engine.by_label("pool_slots").items()}
    return {"engine": engine.name, "info": engine.info, "carried": carried, "pool": pool,
            "counts": {name: found for name, found in problems.items() if found}}  # fmt: skip


def _auto(direction: str, shape: dict[str, int], info: dict[str, str], profile_name: str) -> dict[str, Any]:
    """Auto's decision for the mean shape under the server's objective: the mean of many shapes, so only a hint."""
    from . import _native

    name = info.get("profile", "host") if profile_name == "auto" else profile_name
    if profile_name == "auto" and name not in built_in_names():
        mend = f"the server decides by the profile {name!r}, which is not built in: give its file by --profile"
        return {"reason": mend, "backend": None}
    profile = _native.DeviceProfile(load_profile(name, setting="--profile"))
    total = shape["ranges"] * shape["range_bytes"]
    asked = _native.TransferShape(direction, shape["ranges"], total, shape["range_bytes"], shape["range_bytes"])
    decision = _native.decide(asked, profile, info.get("objective", "balanced"), _native.Policy())
    return {"reason": decision.reason, "backend": decision.backend}


def _show(answer: dict[str, Any]) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    info = answer["info"]
    console.print(Text(f"engine {answer['engine']}: " + ", ".join(f"{k} {v}" for k, v in info.items()), style="bold"))
    table = Table(box=None, pad_edge=False)
    for title in ("direction", "backend", "transfers", "bytes", "GiB/s", "queued", "mean transfer"):
        table.add_column(title, justify="left" if title in ("direction", "backend", "mean transfer") else "right")
    for row in answer["carried"]:
        shape = row["mean_shape"]
        table.add_row(row["direction"], row["backend"], f"{row['transfers']:,}", size(row["bytes"]),
                      f"{row['gib_per_s']}", f"{row['mean_queue_ms']} ms",
                      f"{shape['ranges']} ranges of {size(shape['range_bytes'])}")  # fmt: skip
    console.print(table if answer["carried"] else Text("nothing was moved yet"))
    if answer["carried"]:
        console.print(Text("Auto for the mean shape:", style="dim"))
    for row in answer["carried"]:
        agrees = "" if row["auto"]["backend"] in (row["backend"], None) else " (configured otherwise, or shapes vary)"
        console.print(Text(f"  {row['direction']} {row['backend']}: {row['auto']['reason']}{agrees}"))
    if answer["pool"]:
        console.print(Text("pool: " + ", ".join(f"{v:,} {k}" for k, v in sorted(answer["pool"].items()))))
    for name, found in answer["counts"].items():
        words = name.removesuffix("_total").replace("_", " ")
        console.print(Text(f"{words}: " + ", ".join(f"{v:,} {k}".strip() for k, v in found.items())))
