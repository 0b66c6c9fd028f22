# SPDX-License-Identifier: Apache-2.0
"""Asks a Prometheus every question of the dashboard, and says which have no answer there.

    python examples/grafana/check.py --prometheus http://localhost:9090 [--picture FILE]

--picture draws the answers of the last minutes (matplotlib, not Grafana: the same data in the same order of panels).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("dashboard.json")
# What Grafana fills in: everything, and a window of at least four scrapes.
VARIABLES = {"$model": ".*", "$engine": ".*"}


@dataclass(frozen=True)
class Question:
    panel: str
    unit: str
    expression: str
    legend: str


def questions(window: str = "1m") -> list[Question]:
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", window)
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            unit = panel["fieldConfig"]["defaults"].get("unit", "").removeprefix("suffix:")
            found.append(Question(panel["title"], unit, expression, target.get("legendFormat", "")))  # tables have none
    return found


def ask(prometheus: str, path: str, **parameters: Any) -> list[dict[str, Any]]:
    """The result of a query. Raises ValueError with what Prometheus says against it."""
    url = f"{prometheus.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result
    except urllib.error.HTTPError as error:
        raise ValueError(f"{parameters.get('query')}: {json.load(error).get('error')}") from None


def unanswered(prometheus: str, window: str = "1m") -> list[Question]:
    return [q for q in questions(window) if not ask(prometheus, "query", query=q.expression)]


def draw(prometheus: str, path: Path, seconds: int, window: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    end = time.time()
    by_panel: dict[str, list[Question]] = {}
    for question in questions(window):
        by_panel.setdefault(question.panel, []).append(question)
    rows = -(-len(by_panel) // 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(16, 2.6 * rows), layout="constrained")
    for axis, (title, asked) in zip(axes.flat, by_panel.items(), strict=False):
        for question in asked:
            for series in ask(prometheus, "query_range", query=question.expression, start=end - seconds, end=end,
                              step=max(1, seconds // 200)):  # fmt: skip
                label = question.legend
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                label = re.sub(r"\{\{\w+\}\}", "", label).strip()  # labels that are empty are absent
                times, values = zip(*((at - end, float(value)) for at, value in series["values"]), strict=True)
                axis.plot(times, values, linewidth=1, label=label[:40] or None)
        axis.set_title(f"{title} ({asked[0].unit})" if asked[0].unit else title, fontsize="small")
        axis.tick_params(labelsize="x-small")
        axis.set_ylim(bottom=0)
        if any(q.legend for q in asked):
            axis.legend(fontsize=6, loc="upper left")
    for axis in list(axes.flat)[len(by_panel):]:  # fmt: skip
        axis.set_axis_off()
    figure.suptitle(
        f"Answers of Prometheus to the dashboard's queries, last {seconds} s (drawn by check.py, not Grafana)"
    )
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://localhost:9090", metavar="URL")
    parser.add_argument("--window", default="1m", help="of rates: at least four scrapes")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seconds", type=int, default=300, help="that the picture shows")
    args = parser.parse_args()
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        print("check.py: --picture: matplotlib is missing; install vllm-pega-connector[bench]", file=sys.stderr)
        return 2
    try:
        silent = unanswered(args.prometheus, args.window)
    except (OSError, ValueError) as error:
        print(f"check.py: --prometheus {args.prometheus}: {error}", file=sys.stderr)
        return 2
    for question in silent:
        print(f"no answer: {question.panel}: {question.expression}")
    print(f"{len(questions()) - len(silent)} of {len(questions())} queries have an answer")
    if args.picture:
        draw(args.prometheus, args.picture, args.seconds, args.window)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
