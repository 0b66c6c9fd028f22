# SPDX-License-Identifier: Apache-2.0
"""Writes into the documentation what the code knows: the regions between `<!-- generated: NAME -->` and `<!-- end -->`,
and with --curves the curves of the device profiles.

    python scripts/generate_docs.py [--check] [--curves]

--check writes nothing, and fails if a page is not what the code says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vllm_pega_connector.config import MigrationConfig, PegaConfig, PolicyConfig, RequestModel  # noqa: E402
from vllm_pega_connector.config_text import ENV_PREFIX  # noqa: E402
from vllm_pega_connector.profile import built_in_names, load_profile  # noqa: E402

DOCS = ROOT / "docs"
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, PolicyConfig):
        return '`"auto"`'
    return "unset" if value in (None, ()) else f"`{json.dumps(value)}`"


def _keys(model: Any, skip: tuple[str, ...] = ()) -> str:
    rows = [
        [f"`{name}`", _default(field), field.title, field.description]
        for name, field in model.model_fields.items()
        if name not in skip
    ]
    return _table(["key", "default", "meaning", "allowed"], rows)


def _environment() -> str:
    rows = []
    for name, field in PegaConfig.model_fields.items():
        if name == "migration":
            continue
        allowed = field.description.split(", or an object")[0]
        rows.append([f"`{ENV_PREFIX}{name.upper()}`", f"`{name}`", allowed.replace('"', "")])
    return _table(["variable", "overrides", "allowed"], rows)


def _metrics() -> str:
    from vllm_pega_connector.prometheus import METRICS

    rows = [[f"`vllm:pega_{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.says] for m in METRICS]
    return _table(["metric", "kind", "labels", "counts"], rows)


def _profiles() -> str:
    rows = []
    for name in built_in_names():
        profile = load_profile(name)
        origin = profile["provenance"]
        wires = " / ".join(f"{profile['directions'][d]['contiguous_gib_per_s']:g}" for d in ("load", "save"))
        rows.append([f"`{name}`", origin["gpu"], origin["date"] or "-", wires, origin["method"]])
    return _table(["profile", "for", "measured on", "wire, load / save, GiB/s", "how"], rows)


REGIONS = {
    "keys": lambda: _keys(PegaConfig),
    "policy": lambda: _keys(PolicyConfig),
    "migration": lambda: _keys(MigrationConfig),
    "request": lambda: _keys(RequestModel),
    "environment": _environment,
    "metrics": _metrics,
    "profiles": _profiles,
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """(page, what it is, what it should be) of every page with a generated region."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if REGION.search(text):
            yield page, text, REGION.sub(lambda m: m[1] + "\n" + REGIONS[m[2]]() + "\n" + m[3], text)


def draw_curves() -> None:
    """docs/img/profile-NAME.svg: throughput by range size and backend, each with the best of its settings."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pega"  # the same drawing for the same data
    from matplotlib import pyplot

    for name in built_in_names():
        profile = load_profile(name)
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
        for panel, direction in zip(panels, ("load", "save"), strict=True):
            data = profile["directions"][direction]
            panel.axhline(data["contiguous_gib_per_s"], color="0.6", linestyle=":", label="one contiguous copy")
            best: dict[str, dict[int, tuple[float, str]]] = defaultdict(dict)
            for point in data["curve"]:
                size, new = point["range_bytes"], (point["gib_per_s"], point["source"])
                best[point["backend"]][size] = max(best[point["backend"]].get(size, (0.0, "")), new)
            for backend, color in zip(("memcpy", "kernel", "chunked", "staged"), ("C0", "C1", "C2", "C3"), strict=True):
                sizes = sorted(best[backend])
                if not sizes:
                    continue
                speeds = [best[backend][size][0] for size in sizes]
                panel.plot(sizes, speeds, color=color, label=backend, linewidth=1.2)
                for size, speed in zip(sizes, speeds, strict=True):
                    filled = best[backend][size][1] == "measured"
                    panel.plot(size, speed, "o", color=color, markersize=4, fillstyle="full" if filled else "none")
            panel.set(xscale="log", title=direction, xlabel="bytes per range")
            panel.set_xticks([512, 4096, 65536, 1 << 20], ["512 B", "4 KiB", "64 KiB", "1 MiB"])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("GiB/s")
        panels[1].legend(fontsize="small")
        figure.suptitle(f"{name}: {profile['provenance']['gpu']} (filled: measured; hollow: derived or estimated)",
                        fontsize="medium")  # fmt: skip
        path = DOCS / "img" / f"profile-{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--curves", action="store_true", help="also draw the profiles' curves (needs matplotlib)")
    args = parser.parse_args()
    stale = [(page, wanted) for page, text, wanted in pages() if text != wanted]
    for page, wanted in stale:
        print(f"{page.relative_to(ROOT)}: {'not what the code says' if args.check else 'written'}")
        if not args.check:
            page.write_text(wanted, encoding="utf-8")
    if args.curves:
        draw_curves()
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
