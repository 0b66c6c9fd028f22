# SPDX-License-Identifier: Apache-2.0
"""What the settings are made of: values, policies, migration. `config.py` has the whole."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from .address import HostPort, parse_source

if TYPE_CHECKING:
    from . import _native

BackendName = Literal["auto", "memcpy", "kernel", "chunked", "staged"]
ObjectiveName = Literal["throughput", "balanced", "tail", "strict"]
Direction = Literal["load", "save"]


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


def to_policy(value: Any) -> Any:
    return {"backend": value} if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(_whole_float)]
Endpoint = Annotated[HostPort, PlainValidator(_endpoint), PlainSerializer(str, return_type=str)]
Peer = Annotated[HostPort, PlainValidator(_peer), PlainSerializer(str, return_type=str)]
Source = Annotated[str, AfterValidator(parse_source)]

# --- models ---------------------------------------------------------------------------------------------------
# A field's description is what the error for it says is allowed, its title what the documentation says it does.


class SettingsModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PolicyConfig(SettingsModel):
    """How one direction moves. Unset fields (None) come from the device profile."""

    backend: BackendName = Field(
        default="auto",
        title="how to copy; `auto` decides for each transfer",
        description="auto, memcpy, kernel, chunked or staged",
    )
    max_grid_blocks: int | None = Field(
        default=None,
        title="CTAs that a kernel may occupy",
        ge=1,
        le=65535,
        description="an integer from 1 to 65535 (CTAs)",
    )
    chunk_descriptors: int | None = Field(
        default=None,
        title="ranges in a chunk",
        ge=1,
        le=1 << 20,
        description="an integer from 1 to 1048576 (ranges per chunk)",
    )
    chunk_bytes: int | None = Field(
        default=None,
        title="bytes in a chunk; of `staged`, the size of a stage",
        ge=1 << 10,
        le=1 << 30,
        description="an integer from 1024 to 1073741824 (bytes per chunk)",
    )
    inflight_chunks: int | None = Field(
        default=None, title="chunks submitted and not yet complete", ge=1, le=64, description="an integer from 1 to 64"
    )
    spread_ms: Number | None = Field(
        default=None,
        title="milliseconds over which chunks are submitted evenly; 0 = as fast as it goes. Unset: the objective's, "
        "or 0 where a backend is named",
        ge=0,
        le=10_000,
        description="milliseconds from 0 to 10000",
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


class MigrationConfig(SettingsModel):
    """Pulling KV from other instances. Absent: no agent is started and no port is opened."""

    listen: Endpoint = Field(
        title="where the agent listens; port 0 = any free one. A fixed port survives restarts, and a proxy can know it",
        description='"host:port", IPv6 in brackets, port 0 = any free one',
    )
    advertise: Endpoint | None = Field(
        default=None,
        title="how peers reach it (default: `listen`), where that is a wildcard or behind an address translation",
        description='"host:port" at which peers reach this agent, port 0 = the port of `listen`',
    )
    peers: Annotated[tuple[Peer, ...], BeforeValidator(_tuple)] = Field(
        default=(),
        title="asked for every request that names no source; the one with most of its blocks is read from",
        description='a list of "host:port", IPv6 in brackets, port 1 to 65535',
    )
    allow_sources: Annotated[tuple[Source, ...], BeforeValidator(_tuple)] | None = Field(
        default=None,
        title="hosts or CIDR blocks that a request may name; default: `peers` and this host. Others are left alone",
        description="a list of host names, IP addresses or CIDR blocks without host bits",
    )
    timeout_s: Number = Field(
        default=10.0,
        title="how long a request waits for its blocks before they are computed",
        ge=0.1,
        le=3600,
        description="seconds, from 0.1 to 3600",
    )
    auth_token_file: str | None = Field(
        default=None,
        min_length=1,
        title="a shared secret, the same on all peers",
        description="the path of a file that holds the token",
    )
    model_id: str | None = Field(
        default=None,
        title="the same on all; for models whose paths differ. Default: name and digest of the configuration",
        min_length=1,
        description="a non-empty string, equal on all peers",
    )
    transport: Literal["auto", "tcp", "rdma", "nvlink"] = Field(
        default="auto",
        title="what Mooncake uses; `auto` takes RDMA where there is a device, else TCP",
        description="auto, tcp, rdma or nvlink",
    )
    same_host: Literal["auto", "off"] = Field(
        default="auto",
        title="instances of one machine and user read each other's pools directly; `off`: by Mooncake, like others",
        description="auto or off",
    )
    verify: bool = Field(
        default=False, title="compare checksums (CRC-32) of every block on both sides", description="true or false"
    )

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
