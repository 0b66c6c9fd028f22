# SPDX-License-Identifier: Apache-2.0
"""A table and a plot of benchmarks/transfer.py's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS = ("memcpy", "kernel", "chunked", "staged")


def best_by_backend(rows: list[Any], direction: str, pattern: str) -> dict[str, dict[int, Any]]:
    """Backend -> range size -> its best row."""
    out: dict[str, dict[int, Any]] = {}
    for row in rows:
        if row.direction == direction and row.pattern == pattern:
            known = out.setdefault(row.backend, {})
            if row.range_bytes not in known or row.gib_per_s > known[row.range_bytes].gib_per_s:
                known[row.range_bytes] = row
    return out


def size_name(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def table(rows: list[Any]) -> None:
    """Best setting of each backend: GiB/s, share of the wire, CTAs x chunk."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for direction in dict.fromkeys(r.direction for r in rows):
        for pattern in dict.fromkeys(r.pattern for r in rows):
            best = best_by_backend(rows, direction, pattern)
            if not best:
                continue
            out = Table(title=f"{direction}, {pattern}: GiB/s (share of the contiguous copy; CTAs x chunk)")
            out.add_column("range")
            for backend in best:
                out.add_column(backend, justify="right")
            for size in sorted({size for known in best.values() for size in known}):
                cells = [size_name(size)]
                for known in best.values():
                    r = known.get(size)
                    how = f"; {r.grid} x {size_name(r.chunk_bytes)}" if r and r.backend in OURS else ""
                    cells.append(f"{r.gib_per_s:.1f} ({r.of_wire:.2f}{how})" if r else "")
                out.add_row(*cells)
            console.print(out)


def plot(rows: list[Any], path: Path) -> None:
    """Share of the wire against the range size, one panel per direction, shuffled ranges."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    directions = list(dict.fromkeys(r.direction for r in rows))
    figure, panels = plt.subplots(1, len(directions), figsize=(5 * len(directions), 4), sharey=True, squeeze=False)
    for panel, direction in zip(panels[0], directions, strict=True):
        for backend, known in best_by_backend(rows, direction, "shuffled").items():
            sizes = sorted(known)
            style = "o-" if backend in OURS else "x--"
            panel.plot(sizes, [known[s].of_wire for s in sizes], style, label=backend)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [size_name(s) for s in sizes], rotation=45)
        panel.set_title(direction)
        panel.set_ylim(0, 1.05)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("share of one contiguous pinned copy")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
