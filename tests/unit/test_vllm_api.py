# SPDX-License-Identifier: Apache-2.0
"""Our overrides against vLLM's interface: of the oldest and newest version, by data (`scripts/vllm_api.py`), and of
the installed one. CPU builds of the newest do not exist, so data is all that can be had of it here."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from scripts import vllm_api
from vllm_pega_connector.connector import PegaConnector
from vllm_pega_connector.messages import PegaHandshake, PegaMetadata, PegaWorkerMetadata
from vllm_pega_connector.metrics import PegaStats
from vllm_pega_connector.prometheus import PegaPromMetrics

OURS = {
    "KVConnectorBase_V1": PegaConnector,
    "SupportsHMA": PegaConnector,
    "KVConnectorMetadata": PegaMetadata,
    "KVConnectorWorkerMetadata": PegaWorkerMetadata,
    "KVConnectorHandshakeMetadata": PegaHandshake,
    "KVConnectorStats": PegaStats,
    "KVConnectorPromMetrics": PegaPromMetrics,
}
DATA: dict[str, dict[str, vllm_api.Class]] = json.loads((Path(__file__).parent / "data/vllm_api.json").read_text())
VERSIONS = {**DATA, f"installed {vllm.__version__}": vllm_api.read(Path(vllm.__file__).parent)}


def kind(cls: type, name: str) -> str:
    raw = inspect.getattr_static(cls, name)
    return {property: "property", classmethod: "classmethod", staticmethod: "staticmethod"}.get(type(raw), "method")


def parameters(cls: type, name: str) -> list[inspect.Parameter]:
    raw = inspect.getattr_static(cls, name)
    function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
    found = list(inspect.signature(function).parameters.values())
    return found if isinstance(raw, staticmethod) else found[1:]


def problems(cls: type, name: str, theirs: dict[str, Any]) -> list[str]:
    """Why calls that vLLM's declaration allows might not reach our override as they are meant."""
    where = f"{cls.__name__}.{name}"
    if kind(cls, name) != theirs["kind"]:
        return [f"{where} is a {kind(cls, name)}, vLLM's a {theirs['kind']}"]
    ours, out = parameters(cls, name), []
    for at, declared in enumerate(theirs["parameters"]):
        starred, optional = declared.startswith("*"), declared.endswith("=")
        wanted = declared.rstrip("=")
        if starred:
            kinds = inspect.Parameter.VAR_KEYWORD if wanted.startswith("**") else inspect.Parameter.VAR_POSITIONAL
            if not any(p.kind is kinds for p in ours):
                out.append(f"{where} takes no {wanted}")
        elif at >= len(ours) or ours[at].name != wanted:
            out.append(f"{where}: parameter {at} is not {wanted}")
        elif optional and ours[at].default is inspect.Parameter.empty:
            out.append(f"{where}: {wanted} needs a default")
    more = [p for p in ours[len(theirs["parameters"]) :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    out += [f"{where}: {p.name} is not vLLM's and has no default" for p in more if p.default is p.empty]
    return out


def ours_overrides(cls: type, name: str) -> bool:
    return any(name in base.__dict__ for base in cls.__mro__ if base.__module__.startswith("vllm_pega_connector"))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_override_takes_what_vllm_passes(version: str) -> None:
    found, checked = [], 0
    for theirs, members in VERSIONS[version].items():
        ours = OURS.get(theirs)
        for name, declared in members.items():
            if ours is None or declared["kind"] == "field":
                continue
            if ours_overrides(ours, name):
                found += problems(ours, name, declared)
                checked += 1
            elif declared.get("abstract"):
                found.append(f"{ours.__name__} lacks {name}")
    assert not found
    assert checked >= 30


def test_every_public_method_is_one_that_some_vllm_calls() -> None:
    """A misspelt or retired hook would silently never be called."""
    known = {
        name
        for classes in VERSIONS.values()
        for theirs in ("KVConnectorBase_V1", "SupportsHMA")
        for name in classes[theirs]
    }
    ours = {name for name, value in vars(PegaConnector).items() if callable(value) or isinstance(value, property)}
    assert {name for name in ours if not name.startswith("_")} <= known


def test_the_results_of_transfers_have_the_fields_that_we_set() -> None:
    newest = VERSIONS[max(DATA, key=lambda v: tuple(map(int, v.split("."))))]
    assert {"finished_recving", "failed_recving"} <= newest["KVConnectorTransferResults"].keys()


class Wrong(PegaConnector):
    """What the check is for: each override differs from vLLM's in one way."""

    def get_num_new_matched_tokens(self, request: Any) -> tuple[int, bool]:  # type: ignore[override]
        return 0, False

    def start_load_kv(self, forward_context: Any) -> None:  # type: ignore[override]
        return

    def build_connector_meta(self, output: Any) -> PegaMetadata:  # type: ignore[override]
        return PegaMetadata()

    def reset_cache(self, what: str) -> bool:  # type: ignore[override]
        return True

    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize(
    "name",
    ["get_num_new_matched_tokens", "start_load_kv", "build_connector_meta", "reset_cache", "requires_kv_delivery"],
)
def test_the_check_sees_what_differs(name: str) -> None:
    declared = DATA["0.33.0"]["KVConnectorBase_V1"][name]
    assert len(problems(Wrong, name, declared)) == 1
    assert problems(PegaConnector, name, declared) == []
