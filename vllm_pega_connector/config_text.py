# SPDX-License-Identifier: Apache-2.0
"""Settings as people write them: the environment's overrides, and what is said about wrong ones."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

ENV_PREFIX = "VLLM_PEGA_"
FAULTS_VARIABLE = "VLLM_PEGA_FAULTS"  # no setting; `faults.py` reads it


def show(value: Any) -> str:
    """The value as JSON, cut to one readable line."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"an unreadable {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Annotated[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_of(arg))), None)


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# Keys that people bring from vLLM's own settings, and where they belong.
MISPLACED = {
    "connectors": "belongs to MultiConnector, which gives each of its connectors its own kv_connector_extra_config",
    "cpu_bytes_to_use": "belongs to vLLM's OffloadingConnector; here host_pool_gib sets the size",
    **dict.fromkeys(
        ("kv_connector", "kv_role", "kv_connector_module_path", "kv_load_failure_policy", "kv_connector_extra_config"),
        "belongs one level up, in --kv-transfer-config itself",
    ),
}


def problems(
    model: type[BaseModel], error: ValidationError, names: Mapping[str, str], misplaced: Mapping[str, str]
) -> list[str]:
    """One line per wrong key. `names`: under which name a key was set, where it is another. `misplaced`: unknown keys
    of the outermost object, and where they belong."""
    lines: dict[str, str] = {}
    for item in error.errors():
        # Walk the path into the models: beyond the last key that is a field, pydantic names union branches.
        owner: type[BaseModel] | None = model
        path, allowed = "", ""
        for part in item["loc"]:
            if isinstance(part, int):
                path += f"[{part}]"
            elif owner is not None and part in owner.model_fields:
                path += f".{part}" if path else names.get(part, part)
                allowed = owner.model_fields[part].description or ""
                owner = _model_of(owner.model_fields[part].annotation)
            elif item["type"] == "extra_forbidden":
                shown = part if isinstance(part, str) and part.isprintable() else show(part)
                path += f".{shown}" if path else shown
        if item["type"] == "extra_forbidden" and owner is not None:
            key = str(item["loc"][-1])
            if owner is model and key in misplaced:
                line = f"{path}: {misplaced[key]}"
            else:
                known = list(owner.model_fields)
                line = f"{path}: unknown key{_did_you_mean(key, known)}; allowed: {', '.join(known)}"
        elif item["type"] == "invalid_key":
            path, line = repr(item["input"]), f"{show(item['input'])}: a key must be a string"
        elif item["type"] == "missing":
            line = f"{path}: missing; allowed: {allowed}"
        else:
            why = f" ({item['ctx']['error']})" if item["type"] == "value_error" else ""
            line = f"{path}: got {show(item['input'])}{why}; allowed: {allowed}"
        lines.setdefault(path, line)
    return list(lines.values())


def environment(env: Mapping[str, str], keys: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The overrides of `keys` that the environment sets, as JSON values, and what is wrong with its names."""
    overrides: dict[str, Any] = {}
    problems: list[str] = []
    known = {f"{ENV_PREFIX}{key.upper()}": key for key in keys if key != "migration"}
    for variable in sorted(
        name for name in env if name.startswith(ENV_PREFIX) and env[name] and name != FAULTS_VARIABLE
    ):
        key = variable.removeprefix(ENV_PREFIX).lower()
        if variable in known:
            overrides[key] = _from_text(key, env[variable].strip())
        elif key.split("_")[0] == "migration":
            problems.append(f"{variable}: migration is an object; set it in kv_connector_extra_config")
        else:
            close = difflib.get_close_matches(key, known.values(), n=1, cutoff=0.6)
            mend = f"did you mean {ENV_PREFIX}{close[0].upper()}?" if close else "unset it"
            problems.append(f"{variable}: no such setting; {mend}")
    return overrides, problems


def _from_text(key: str, text: str) -> Any:
    """The JSON value that a variable's text stands for; text that stands for none is refused by the model."""
    if key in ("save_decode", "log_decisions"):
        return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False,
                "off": False}.get(text.lower(), text)  # fmt: skip
    if key in ("host_pool_gib", "transfer_timeout_s", "max_pending_save_blocks"):
        try:
            return int(text) if key == "max_pending_save_blocks" else float(text)
        except ValueError:
            return text.lower()
    if key in ("load_policy", "save_policy", "kv_layout", "objective", "eviction"):
        return text.lower()
    return text
