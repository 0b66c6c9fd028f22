# SPDX-License-Identifier: Apache-2.0
"""What a version of vLLM asks of a KV connector, as data: names, kinds and parameters, read without importing vLLM.

    python scripts/vllm_api.py 0.33.0=/path/to/vllm [...] > tests/unit/data/vllm_api.json

A path is that of the package's folder (an unpacked wheel's or an installed one's). Run it for the oldest and the newest
version that we support.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

V1 = "distributed/kv_transfer/kv_connector/v1"
# The classes that ours derive from, or that we make ourselves.
CLASSES = {
    f"{V1}/base.py": (
        "KVConnectorBase_V1", "SupportsHMA", "KVConnectorMetadata", "KVConnectorWorkerMetadata",
        "KVConnectorHandshakeMetadata", "KVConnectorTransferResults",
    ),
    f"{V1}/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
}  # fmt: skip

Class = dict[str, dict[str, Any]]


def read(package: Path) -> dict[str, Class]:
    """The classes that this version has: class -> member -> kind, whether it must be overridden, parameters."""
    found = {}
    for file, names in CLASSES.items():
        for node in ast.parse((package / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                found[node.name] = _members(node)
    return found


def _members(node: ast.ClassDef) -> Class:
    members: Class = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            members[item.target.id] = {"kind": "field"}
        if not isinstance(item, ast.FunctionDef) or (item.name.startswith("_") and item.name != "__init__"):
            continue
        decorators = {d.id for d in item.decorator_list if isinstance(d, ast.Name)}
        kind = next(iter(decorators & {"property", "classmethod", "staticmethod"}), "method")
        members[item.name] = {"kind": kind, "parameters": _parameters(item.args, kind)}
        if "abstractmethod" in decorators:
            members[item.name]["abstract"] = True
    return members


def _parameters(args: ast.arguments, kind: str) -> list[str]:
    """As one writes them, without types: "name", "name=" with a default, "*args", "*" before keywords."""
    positional = [*args.posonlyargs, *args.args]
    plain = len(positional) - len(args.defaults)
    out = [a.arg + ("=" if i >= plain else "") for i, a in enumerate(positional)][kind != "staticmethod" :]
    if args.vararg or args.kwonlyargs:
        out.append(f"*{args.vararg.arg if args.vararg else ''}")
    out += [a.arg + ("=" if d else "") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*out, *([f"**{args.kwarg.arg}"] if args.kwarg else [])]


def main(arguments: list[str]) -> None:
    versions = dict(argument.split("=", 1) for argument in arguments)
    lines = []
    for version, path in versions.items():
        classes = [
            f"  {json.dumps(name)}: {{\n"
            + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in members.items())
            + "\n  }"
            for name, members in read(Path(path)).items()
        ]
        lines.append(f" {json.dumps(version)}: {{\n" + ",\n".join(classes) + "\n }")
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1:])
