# SPDX-License-Identifier: Apache-2.0
"""The connector's settings: `kv_connector_extra_config`, its environment overrides, and per-request parameters.

Everything is checked once, here; afterwards the frozen models are trusted. Importing this module needs neither
vLLM nor the native module.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from .address import HostPort, parse_source

if TYPE_CHECKING:
    from . import _native

BackendName = Literal["auto", "memcpy", "kernel", "chunked", "staged"]
ObjectiveName = Literal["throughput", "balanced", "tail", "strict"]
Direction = Literal["load", "save"]
ENV_PREFIX = "VLLM_PEGA_"


class ConfigError(ValueError):
    """One line per problem: the key, what was given, what is allowed."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("invalid PegaConnector configuration:\n  " + "\n  ".join(self.problems))


def read_bounded(path: Path, limit: int = 1 << 20) -> bytes:
    """A small file's bytes. Raises OSError, also for more than `limit`: /dev/zero would fill the memory first."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 10} KiB")
    return data


# --- values ---------------------------------------------------------------------------------------------------


def _endpoint(value: Any) -> HostPort:
    if isinstance(value, HostPort):
        return value
    if not isinstance(value, str):
        raise ValueError("not a string")
    return HostPort.parse(value)


def _peer(value: Any) -> HostPort:
    endpoint = _endpoint(value)
    if endpoint.port == 0:
        raise ValueError("a peer needs its port")
    return endpoint


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _whole_float(value: Any) -> Any:
    """JSON has one kind of number: 4 and 4.0 are both GiB. A bool is none."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def _policy(value: Any) -> Any:
    return {"backend": value} if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(_whole_float)]
Endpoint = Annotated[HostPort, PlainValidator(_endpoint), PlainSerializer(str, return_type=str)]
Peer = Annotated[HostPort, PlainValidator(_peer), PlainSerializer(str, return_type=str)]
Source = Annotated[str, AfterValidator(parse_source)]

# --- models ---------------------------------------------------------------------------------------------------
# A field's description is what the error for it says is allowed.


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PolicyConfig(_Model):
    """How one direction moves. Unset fields (None) come from the device profile."""

    backend: BackendName = Field(default="auto", description="auto, memcpy, kernel, chunked or staged")
    max_grid_blocks: int | None = Field(default=None, ge=1, le=65535, description="an integer from 1 to 65535 (CTAs)")
    chunk_descriptors: int | None = Field(
        default=None, ge=1, le=1 << 20, description="an integer from 1 to 1048576 (ranges per chunk)"
    )
    chunk_bytes: int | None = Field(
        default=None, ge=1 << 10, le=1 << 30, description="an integer from 1024 to 1073741824 (bytes per chunk)"
    )
    inflight_chunks: int | None = Field(default=None, ge=1, le=64, description="an integer from 1 to 64")
    spread_ms: Number | None = Field(
        default=None, ge=0, le=10_000, description="milliseconds from 0 (as fast as it goes) to 10000"
    )

    def to_native(self) -> _native.Policy:
        """The same policy for the engine, where 0 means unset."""
        from . import _native

        return _native.Policy(
            self.backend,
            self.max_grid_blocks or 0,
            self.chunk_descriptors or 0,
            self.chunk_bytes or 0,
            self.inflight_chunks or 0,
            -1 if self.spread_ms is None else round(self.spread_ms * 1000),
        )


class MigrationConfig(_Model):
    """Pulling KV from other instances. Absent: no agent is started and no port is opened."""

    listen: Endpoint = Field(description='"host:port", IPv6 in brackets, port 0 = any free one')
    advertise: Endpoint | None = Field(
        default=None, description='"host:port" at which peers reach this agent, port 0 = the port of `listen`'
    )
    peers: Annotated[tuple[Peer, ...], BeforeValidator(_tuple)] = Field(
        default=(), description='a list of "host:port", IPv6 in brackets, port 1 to 65535'
    )
    allow_sources: Annotated[tuple[Source, ...], BeforeValidator(_tuple)] | None = Field(
        default=None, description="a list of host names, IP addresses or CIDR blocks without host bits"
    )
    timeout_s: Number = Field(default=10.0, gt=0, le=3600, description="seconds, above 0 and at most 3600")
    auth_token_file: str | None = Field(
        default=None, min_length=1, description="the path of a file that holds the token"
    )
    model_id: str | None = Field(default=None, min_length=1, description="a non-empty string, equal on all peers")
    transport: Literal["auto", "tcp", "rdma", "nvlink"] = Field(default="auto", description="auto, tcp, rdma or nvlink")
    verify: bool = Field(default=False, description="true or false")

    def auth_token(self) -> bytes | None:
        """The shared secret, without surrounding white space. Raises ConfigError if it cannot be read."""
        if self.auth_token_file is None:
            return None
        path = Path(self.auth_token_file).expanduser()
        try:
            token = read_bounded(path).strip()
        except OSError as error:
            raise ConfigError([f"migration.auth_token_file: cannot read {path}: {error.strerror}"]) from None
        if not token:
            raise ConfigError([f"migration.auth_token_file: {path} is empty; write a secret into it"])
        return token


class PegaConfig(_Model):
    """The whole of `kv_connector_extra_config`, every default filled in."""

    host_pool_gib: Literal["auto"] | Annotated[Number, Field(gt=0, le=1 << 20)] = Field(
        default="auto", description='GiB of host memory per rank, above 0 and at most 1048576, or "auto"'
    )
    kv_layout: Literal["auto", "vllm", "block"] = Field(default="auto", description="auto, vllm or block")
    load_policy: Annotated[PolicyConfig, BeforeValidator(_policy)] = Field(
        default=PolicyConfig(),
        description="auto, memcpy, kernel, chunked, staged, or an object with `backend` and its limits",
    )
    save_policy: Annotated[PolicyConfig, BeforeValidator(_policy)] = Field(
        default=PolicyConfig(),
        description="auto, memcpy, kernel, chunked, staged, or an object with `backend` and its limits",
    )
    objective: ObjectiveName = Field(default="balanced", description="throughput, balanced, tail or strict")
    device_profile: str = Field(
        default="auto", min_length=1, description='"auto", the name of a built-in profile, or the path of a JSON file'
    )
    eviction: Literal["lru"] = Field(default="lru", description="lru")
    save_decode: bool = Field(default=True, description="true or false")
    transfer_timeout_s: Number = Field(default=30.0, gt=0, le=86400, description="seconds, above 0 and at most 86400")
    max_pending_save_blocks: Literal["auto"] | Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        default="auto", description='a number of GPU blocks, 1 or more, or "auto"'
    )
    migration: MigrationConfig | None = Field(default=None, description="an object with at least `listen`, or null")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None, env: Mapping[str, str] = os.environ) -> PegaConfig:
        """Validates the settings, the environment's overrides applied.

        `extra` is vLLM's `kv_connector_extra_config`. `VLLM_PEGA_<KEY>` overrides the scalar key of that name;
        an empty variable counts as unset. Raises ConfigError with every problem found.
        """
        if extra is None:
            extra = {}
        if not isinstance(extra, Mapping):
            raise ConfigError([f"kv_connector_extra_config: got {_show(extra)}; allowed: a JSON object"])
        overrides, problems = _environment(env)
        try:
            config = cls.model_validate({**extra, **overrides})
        except ValidationError as error:
            problems += _problems(cls, error, {key: f"{ENV_PREFIX}{key.upper()}" for key in overrides})
        if problems:
            raise ConfigError(problems)
        return config

    def policy(self, direction: Direction) -> PolicyConfig:
        return self.load_policy if direction == "load" else self.save_policy


# --- errors and the environment -------------------------------------------------------------------------------


def _show(value: Any) -> str:
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
_MISPLACED = {
    "connectors": "belongs to MultiConnector, which gives each of its connectors its own kv_connector_extra_config",
    "cpu_bytes_to_use": "belongs to vLLM's OffloadingConnector; here host_pool_gib sets the size",
    **dict.fromkeys(
        ("kv_connector", "kv_role", "kv_connector_module_path", "kv_load_failure_policy", "kv_connector_extra_config"),
        "belongs one level up, in --kv-transfer-config itself",
    ),
}


def _problems(model: type[BaseModel], error: ValidationError, names: Mapping[str, str]) -> list[str]:
    """One line per wrong key; `names` gives the name under which a key was set, where it is another."""
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
                path += f".{part}" if path else part
        if item["type"] == "extra_forbidden" and owner is not None:
            key = str(item["loc"][-1])
            if owner is PegaConfig and key in _MISPLACED:
                line = f"{path}: {_MISPLACED[key]}"
            else:
                known = list(owner.model_fields)
                line = f"{path}: unknown key{_did_you_mean(key, known)}; allowed: {', '.join(known)}"
        elif item["type"] == "invalid_key":
            path, line = repr(item["input"]), f"{_show(item['input'])}: a key must be a string"
        elif item["type"] == "missing":
            line = f"{path}: missing; allowed: {allowed}"
        else:
            why = f" ({item['ctx']['error']})" if item["type"] == "value_error" else ""
            line = f"{path}: got {_show(item['input'])}{why}; allowed: {allowed}"
        lines.setdefault(path, line)
    return list(lines.values())


def _environment(env: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The overrides that the environment sets, as JSON values, and what is wrong with the variables' names."""
    overrides: dict[str, Any] = {}
    problems: list[str] = []
    known = {f"{ENV_PREFIX}{key.upper()}": key for key in PegaConfig.model_fields if key != "migration"}
    for variable in sorted(name for name in env if name.startswith(ENV_PREFIX) and env[name]):
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
    if key == "save_decode":
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


# --- per request ----------------------------------------------------------------------------------------------

_MAX_PROBLEMS = 8  # a client may send anything, and each problem is logged


class _RequestModel(_Model):
    source: Peer | None = Field(default=None, description='the "host:port" of an agent, IPv6 in brackets')
    load_policy: Annotated[PolicyConfig, BeforeValidator(_policy)] | None = Field(
        default=None, description=PegaConfig.model_fields["load_policy"].description
    )
    save_policy: Annotated[PolicyConfig, BeforeValidator(_policy)] | None = Field(
        default=None, description=PegaConfig.model_fields["save_policy"].description
    )
    save: bool = Field(default=True, description="true or false")
    # What we hand out with a finished request, so that a proxy may hand it on unchanged.
    blocks: int | None = Field(default=None, ge=0, description="an integer, 0 or more")
    fingerprint: str | None = Field(default=None, description="a string")


@dataclass(frozen=True)
class RequestParams:
    """`kv_transfer_params["pega"]` of one request. A policy of None means the configured one."""

    source: HostPort | None = None
    load_policy: PolicyConfig | None = None
    save_policy: PolicyConfig | None = None
    save: bool = True
    fingerprint: str | None = None
    problems: tuple[str, ...] = ()

    @classmethod
    def parse(cls, kv_transfer_params: Any, config: PegaConfig) -> RequestParams:
        """Never raises: a client's mistake must not reach the engine.

        A key that is wrong keeps its default and adds a line to `problems`; the others count. Whether `source`
        may be contacted is for the agent to say (`allow_sources`).
        """
        if kv_transfer_params is None:
            return cls()
        if not isinstance(kv_transfer_params, Mapping):
            return cls(problems=(f"kv_transfer_params: got {_show(kv_transfer_params)}; allowed: an object",))
        pega = kv_transfer_params.get("pega")
        if pega is None:
            return cls()
        if not isinstance(pega, Mapping):
            return cls(problems=(f"kv_transfer_params.pega: got {_show(pega)}; allowed: an object",))
        try:
            values, problems = _salvage(dict(pega))
        except Exception as error:  # whatever a client has found, its request alone goes without parameters
            return cls(problems=(f"kv_transfer_params.pega: unreadable ({type(error).__name__})",))
        if values.source is not None and config.migration is None:
            problems.append("source: migration is not configured on this instance")
        return cls(
            source=values.source if config.migration is not None else None,
            load_policy=values.load_policy,
            save_policy=values.save_policy,
            save=values.save,
            fingerprint=values.fingerprint,
            problems=tuple(problems[:_MAX_PROBLEMS]),
        )


def _salvage(given: dict[Any, Any]) -> tuple[_RequestModel, list[str]]:
    """Keeps what is right, and says what was left out as wrong."""
    try:
        return _RequestModel.model_validate(given), []
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors()}
        good = {key: value for key, value in given.items() if key in _RequestModel.model_fields and key not in wrong}
        return _RequestModel.model_validate(good), _problems(_RequestModel, error, {})
