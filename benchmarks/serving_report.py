# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/serving_traffic.py makes of its samples: percentiles, excess, tables, a plot. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SESSIONS = ("load1", "load8", "store1", "store8")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Empty for no values: a figure that was not measured is absent, not zero."""
    if not len(values):
        return {}
    p50, p99, p999 = np.percentile(values, (50, 99, 99.9))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99), "p99.9": float(p999),
            "max": float(max(values)), "samples": len(values)}  # fmt: skip


def excess(gaps: Sequence[float], above: float) -> float:
    """What disturbances cost one stream in all: the sum of (gap - median gap) over gaps longer than `above`."""
    if not len(gaps):
        return 0.0
    array = np.asarray(gaps)
    median = np.median(array)
    return float((array[array > max(above, median)] - median).sum())


def rate(transfers: Iterable[tuple[str, float, float]], direction: str) -> float | None:
    """GiB/s of one direction: bytes over seconds of transfer, waiting in queues left out."""
    moved = [(nbytes, seconds) for d, nbytes, seconds in transfers if d == direction]
    seconds = sum(s for _, s in moved)
    return sum(n for n, _ in moved) / seconds / 2**30 if seconds else None


def thread_times(steps: Sequence[dict[str, float]], active: Sequence[bool]) -> dict[str, dict[str, float]]:
    """Microseconds that each connector method took of the engine's thread: per step, not per call.

    `p50 active` is over the steps that handed transfers over; `p99` and `max` are over all steps.
    """
    rows: dict[str, dict[str, float]] = {}
    names = sorted({name for step in steps for name in step})
    columns = {"all methods": [sum(step.values()) for step in steps]}
    columns |= {name: [step.get(name, 0.0) for step in steps] for name in names}
    for name, seconds in columns.items():
        us = np.asarray(seconds) * 1e6
        if len(us) and us.max() > 0:
            busy = us[np.asarray(active, bool)]
            rows[name] = {"p50": float(np.median(us)), "p99": float(np.percentile(us, 99)), "max": float(us.max())}
            if len(busy):
                rows[name]["p50 active"] = float(np.median(busy))
    return rows


# --- tables ---


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return [f"\n### {title}\n", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *body] if body else []


def markdown(document: dict[str, Any]) -> str:
    """Every figure of a run; what is missing was not measured."""
    connectors: dict[str, Any] = document["connectors"]
    lines = [f"vLLM {document['vllm']}, {document['device']}, model {document['options']['model']}"]
    for phase in SESSIONS:
        rows = []
        for name, found in connectors.items():
            r = found.get(phase)
            if r is None:
                continue
            itl, alone, spread = r["itl"], r["alone"], r["alone_p99_each"]
            rows.append((
                name + (f" (VOID: {r['void']})" if r["void"] else ""),
                f"{alone['p50']:.2f}", f"{alone['p99']:.2f} ({min(spread):.2f}-{max(spread):.2f})",
                f"{alone['max']:.2f}", f"{itl['p50']:.2f}",
                f"{itl['p99']:.2f} ({itl['p99'] / alone['p99']:.2f}x)", f"{itl['p99.9']:.2f}",
                f"{itl['max']:.2f} ({itl['max'] / alone['max']:.2f}x)",
                f"{r['excess_ms']:.2f} ({min(r['excess_ms_each']):.2f}-{max(r['excess_ms_each']):.2f})",
                f"{r['side_ms']['p50']:.1f} / {r['side_ms']['max']:.1f}", f"{r['hit_rate']:.3f}",
                _number(r.get("stored_share"), 3), _number(r.get("load_gib_s")), _number(r.get("save_gib_s")),
            ))  # fmt: skip
        head = ("connector", "alone p50", "alone p99 (runs)", "alone max", "ITL p50", "p99", "p99.9", "max",
                "excess ms (runs)", "request ms p50 / max", "hit rate", "stored", "load GiB/s",
                "save GiB/s")  # fmt: skip
        lines += _table(f"{phase}: milliseconds between tokens", head, rows)
    lines += _ttft_table(connectors) + _throughput_table(connectors) + _thread_table(connectors)
    lines += [f"\n{name}: {found['error']}" for name, found in connectors.items() if "error" in found]
    return "\n".join(lines) + "\n"


def _ttft_table(connectors: dict[str, Any]) -> list[str]:
    rows = []
    for name, found in connectors.items():
        for tokens, r in found.get("ttft", {}).items():
            hit = f"{r['host']:.1f}" + (f" (VOID: {r['void']})" if r["void"] else "")
            rows.append((name, tokens, f"{r['cold']:.1f}", f"{r['gpu']:.1f}", hit, f"{r['hit_rate']:.3f}",
                         _number(r.get("load_gib_s"))))  # fmt: skip
    head = ("connector", "tokens", "cold", "GPU hit", "host hit", "hit rate", "load GiB/s")
    return _table("Time to first token, milliseconds (median)", head, rows)


def _throughput_table(connectors: dict[str, Any]) -> list[str]:
    found = {name: c["throughput"] for name, c in connectors.items() if "throughput" in c}
    base = float(np.median(found["none"]["seconds"])) if "none" in found else None
    rows = []
    for name, r in found.items():
        seconds = float(np.median(r["seconds"]))
        growth = f"{seconds / base - 1:+.2%}" if base else "-"
        each = ", ".join(f"{s:.3f}" for s in r["seconds"])
        rows.append((name + (f" (VOID: {r['void']})" if r["void"] else ""), f"{seconds:.3f}", growth, each,
                     _number(r.get("stored_share"), 3)))  # fmt: skip
    return _table("Store-heavy throughput, seconds", ("connector", "median", "to none", "each", "stored"), rows)


def _thread_table(connectors: dict[str, Any]) -> list[str]:
    rows = []
    for name, found in connectors.items():
        for phase in SESSIONS:
            methods = found.get(phase, {}).get("thread_us", {})
            for method, us in methods.items():
                if us["max"] >= 50 or method == "all methods":
                    rows.append((name, phase, method, _number(us.get("p50 active"), 0), f"{us['p99']:.0f}",
                                 f"{us['max']:.0f}"))  # fmt: skip
    head = ("connector", "phase", "method", "p50 of active steps", "p99 of all steps", "max")
    return _table("Connector's time on the engine's thread, microseconds a step (methods above 50)", head, rows)


# --- plot ---


def plot(document: dict[str, Any], path: Path) -> None:
    """Share of gaps longer than x, one panel a phase; dotted: the same engine's streams alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    connectors: dict[str, Any] = document["connectors"]
    phases = [p for p in SESSIONS if any(p in found for found in connectors.values())]
    if not phases:
        return
    figure, panels = plt.subplots(1, len(phases), figsize=(4.5 * len(phases), 4), sharey=True, squeeze=False)
    for panel, phase in zip(panels[0], phases, strict=True):
        for i, (name, found) in enumerate(connectors.items()):
            if phase not in found:
                continue
            for key, style, label in (("gaps_ms", "-", name), ("alone_gaps_ms", ":", None)):
                gaps = np.sort(found[phase][key])
                share = 1 - np.arange(len(gaps)) / len(gaps)
                panel.step(gaps, share, style, color=f"C{i}", label=label, where="post")
        panel.set(title=phase, xscale="log", yscale="log", xlabel="ms between tokens of one stream")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("share of gaps longer than x")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
