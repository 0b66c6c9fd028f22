# SPDX-License-Identifier: Apache-2.0
"""The curves of a device profile as a picture."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .calibrate import BACKENDS, DIRECTIONS, size_name


def draw(profile: dict[str, Any], path: Path) -> None:
    """Above: throughput by range size, from each backend's slowest setting to its fastest. Below: what decode feels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, len(DIRECTIONS), figsize=(11, 8), sharex=True, squeeze=False)
    for column, direction in enumerate(DIRECTIONS):
        side = profile["directions"][direction]
        rate, growth = panels[0][column], panels[1][column]
        rate.axhline(side["contiguous_gib_per_s"], color="black", linestyle=":", label="one contiguous copy")
        for number, backend in enumerate(BACKENDS):
            _band(rate, side["curve"], "gib_per_s", backend, f"C{number}")
            _band(growth, side["interference"], "p99_growth", backend, f"C{number}")
        sizes = sorted({point["range_bytes"] for point in side["curve"]})
        growth.set_xscale("log", base=2)
        growth.set_xticks(sizes, [size_name(size) for size in sizes], rotation=45)
        growth.set_yscale("symlog", linthresh=0.1)
        rate.set_title(f"{direction}: all settings of a backend")
        for panel in (rate, growth):
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("GiB/s")
    panels[1][0].set_ylabel("growth of decode p99 (1 = +100 %)")
    panels[0][0].legend(fontsize="small")
    figure.suptitle(profile["provenance"]["gpu"])
    figure.tight_layout()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        figure.savefig(Path(folder) / path.name, dpi=120)
        os.replace(Path(folder) / path.name, path)
    plt.close(figure)


def _band(panel: Any, points: list[dict[str, Any]], value: str, backend: str, colour: str) -> None:
    """From the least to the largest value of a backend's settings, by range size."""
    values: dict[int, list[float]] = {}
    for point in points:
        if point["backend"] == backend:
            values.setdefault(point["range_bytes"], []).append(point[value])
    sizes = sorted(values)
    panel.plot(sizes, [max(values[s]) for s in sizes], "o-", color=colour, label=backend)
    panel.fill_between(
        sizes, [min(values[s]) for s in sizes], [max(values[s]) for s in sizes], color=colour, alpha=0.15
    )
