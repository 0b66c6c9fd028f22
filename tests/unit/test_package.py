# SPDX-License-Identifier: Apache-2.0
"""The package as others meet it: what importing it costs, how vLLM finds it, and that the stubs tell the truth."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_pega_connector

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("vllm_pega_connector", "csrc", "tests", "benchmarks", "examples", "scripts", ".ci")
COMMENTED = {".py", ".pyi", ".h", ".cpp", ".cu", ".sh", ""}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after `statement`."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["vllm_pega_connector", "vllm_pega_connector.cli", "vllm_pega_connector.config"])
def test_importing_pulls_in_neither_torch_nor_vllm(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert "vllm_pega_connector" in loaded
    assert not loaded & {"torch", "vllm", "cupy", "mooncake"}


def test_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="PegaConector"):
        _ = vllm_pega_connector.PegaConector


def test_entry_points_lead_somewhere() -> None:
    try:
        entries = importlib.metadata.distribution("vllm-pega-connector").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-pega-connector is not installed here; `make test` installs it")
    found = {(entry.group, entry.name): entry.load() for entry in entries}
    assert callable(found["console_scripts", "pega"])
    assert callable(found["vllm.general_plugins", "pega_connector"])


def test_vllm_finds_the_connector_by_name() -> None:
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    from vllm_pega_connector.plugin import register

    register()
    register()  # vLLM may load its plugins more than once in a process
    assert factory._registry["PegaConnector"]() is vllm_pega_connector.PegaConnector


def test_loaded_by_path_alone_the_name_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiConnector looks the class up by its name, to read our statistics in the API server."""
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    monkeypatch.setattr(factory, "_registry", {})
    monkeypatch.delitem(sys.modules, "vllm_pega_connector.connector", raising=False)
    monkeypatch.setattr(vllm_pega_connector, "connector", None, raising=False)  # what the import sets is undone
    loaded = vllm_pega_connector.PegaConnector
    assert factory.get_connector_class_by_name("PegaConnector") is loaded


def native_stub() -> dict[str, set[str]]:
    """Name -> members of what _native.pyi declares; functions have none."""
    tree = ast.parse((ROOT / "vllm_pega_connector" / "_native.pyi").read_text())
    declared: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            declared[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
            declared[node.name] = members | fields
    return declared


def test_native_module_has_what_its_stub_declares() -> None:
    from vllm_pega_connector import _native

    declared = native_stub()
    assert len(declared) > 10
    missing = [name for name in declared if not hasattr(_native, name)]
    missing += [f"{name}.{m}" for name, members in declared.items() for m in members if not _has(_native, name, m)]
    assert not missing


def _has(module: object, name: str, member: str) -> bool:
    owner = getattr(module, name, None)
    # Every class inherits object's __init__, so look whether it brings its own.
    return owner is not None and (member in vars(owner) if member == "__init__" else hasattr(owner, member))


def test_native_module_has_nothing_undeclared() -> None:
    from vllm_pega_connector import _native

    declared = native_stub()
    public = {name: value for name, value in vars(_native).items() if not name.startswith("_")}
    undeclared = [name for name in public if name not in declared]
    for name, value in public.items():
        if isinstance(value, type):
            members = {member for member in vars(value) if not member.startswith("_")}
            undeclared += [f"{name}.{member}" for member in members - declared.get(name, set())]
    assert not undeclared


def test_every_source_names_its_licence() -> None:
    files = [
        path
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in COMMENTED and "__pycache__" not in path.parts and path.stat().st_size
    ]
    assert len(files) > 30
    unmarked = [
        str(path.relative_to(ROOT))
        for path in files
        if "SPDX-License-Identifier: Apache-2.0" not in "".join(path.read_text().splitlines()[:3])
    ]
    assert not unmarked
