# SPDX-License-Identifier: Apache-2.0
"""`pega config`: validates a configuration as the connector would at start-up, and prints it resolved."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .config import ConfigError, PegaConfig, read_bounded
from .config_text import ENV_PREFIX
from .gpu import gpu_name
from .profile import load_profile

MODULE = "vllm_pega_connector"
ROLES = ("kv_both", "kv_producer", "kv_consumer")
# A whole --kv-transfer-config has at least one of these; our own keys never look like them.
TRANSFER_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_connector_module_path",
                 "kv_load_failure_policy")  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="validate a configuration and print it resolved",
        description="Validates a configuration without starting vLLM. VLLM_PEGA_<KEY> variables are applied.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "settings",
        metavar="JSON",
        help="kv_connector_extra_config or a whole --kv-transfer-config: JSON, a file's path, or - for standard input",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="config")


def run(args: Any) -> int:
    given = parse_object(read_argument(args.settings))
    if "connectors" in given and not any(key in given for key in TRANSFER_KEYS):
        given = {"kv_connector": "MultiConnector", "kv_connector_extra_config": given}
    extra, warnings = _unwrap(given) if any(key in given for key in TRANSFER_KEYS) else (given, [])
    config = PegaConfig.from_extra_config(extra)
    profile = load_profile(config.device_profile, gpu_name())
    if config.migration is not None:
        config.migration.auth_token()
    if args.json:
        resolved = {"config": config.model_dump(mode="json"), "device_profile": profile["name"], "warnings": warnings}
        print(json.dumps(resolved, indent=2))
    else:
        _show(config, extra, profile["name"])
    for warning in warnings:
        print(f"pega config: warning: {warning}", file=sys.stderr)
    return 0


def read_argument(argument: str) -> str:
    """A JSON text, or what a file of that name or `-` holds. Raises ConfigError."""
    if argument == "-":
        return sys.stdin.read()
    if argument.lstrip().startswith(("{", "[")) or not argument.strip():
        return argument
    try:
        return read_bounded(Path(argument)).decode()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise ConfigError([f"{argument[:60]!r} is neither a JSON object nor a readable file ({why})"]) from None


def parse_object(text: str) -> dict[str, Any]:
    """Raises ConfigError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError([f"{key}: given more than once" for key in twice])
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        mend = "; quote the JSON in single quotes for the shell" if "'" in text or '"' not in text else ""
        raise ConfigError([f"not valid JSON: {error.msg} at {where}{mend}"]) from None
    except RecursionError:
        raise ConfigError(["not a configuration: nested too deeply"]) from None
    except ConfigError:
        raise
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise ConfigError(["not a configuration: a number has too many digits"]) from None
    if not isinstance(value, dict):
        raise ConfigError([f"a configuration is a JSON object, not {type(value).__name__}"])
    return value


def _unwrap(transfer: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our settings out of a whole --kv-transfer-config, and what in it will not work well."""
    if transfer.get("kv_connector") == "MultiConnector":
        children = (transfer.get("kv_connector_extra_config") or {}).get("connectors")
        ours = [child for child in children or [] if isinstance(child, dict)
                and child.get("kv_connector") == "PegaConnector"]  # fmt: skip
        if len(ours) != 1:
            raise ConfigError([f"connectors: {len(ours)} of them are PegaConnector; allowed: one"])
        inner, warnings = _unwrap({"kv_role": transfer.get("kv_role"), **ours[0]})
        # The policy for failed loads is read at the top only.
        return inner, [w for w in warnings if "kv_load_failure_policy" not in w] + _failure_policy(transfer)
    problems = []
    if transfer.get("kv_connector") != "PegaConnector":
        problems.append(f"kv_connector: got {json.dumps(transfer.get('kv_connector'))}; allowed: PegaConnector")
    if transfer.get("kv_role") not in ROLES:
        problems.append(f"kv_role: got {json.dumps(transfer.get('kv_role'))}; allowed: {', '.join(ROLES)}")
    path = transfer.get("kv_connector_module_path", MODULE)
    if path != MODULE:
        problems.append(f"kv_connector_module_path: got {json.dumps(path)}; allowed: {MODULE}, or leave it out")
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        problems.append(f"kv_connector_extra_config: got {json.dumps(extra)}; allowed: a JSON object")
    if problems:
        raise ConfigError(problems)
    misplaced = [key for key in PegaConfig.model_fields if key in transfer]
    if misplaced:
        raise ConfigError([f"{key}: belongs into kv_connector_extra_config" for key in misplaced])
    return extra, _failure_policy(transfer)


def _failure_policy(transfer: dict[str, Any]) -> list[str]:
    policy = transfer.get("kv_load_failure_policy", "fail")
    if policy == "recompute":
        return []
    return [f'kv_load_failure_policy is {json.dumps(policy)}: a failed load fails its request; set it to "recompute"']


def _show(config: PegaConfig, extra: dict[str, Any], profile_name: str) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("setting", "value", "from"):
        table.add_column(title, overflow="fold")
    resolved = config.model_dump(mode="json")
    for key, value in resolved.items():
        source = "default"
        if os.environ.get(f"{ENV_PREFIX}{key.upper()}"):
            source = f"{ENV_PREFIX}{key.upper()}"
        elif key in extra:
            source = "given"
        if isinstance(value, dict) and key.endswith("_policy"):
            value = {name: v for name, v in value.items() if v is not None}
            value = value["backend"] if list(value) == ["backend"] else value
        text = value if isinstance(value, str) else json.dumps(value)
        if key == "device_profile" and value != profile_name:
            text += f" ({profile_name})"
        table.add_row(key, Text(text), source)
    Console(soft_wrap=not sys.stdout.isatty()).print(table)
