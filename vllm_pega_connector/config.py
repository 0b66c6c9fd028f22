# SPDX-License-Identifier: Apache-2.0
"""The connector's settings: `kv_connector_extra_config`, its environment overrides, and per-request parameters.

Everything is checked once, here; afterwards the frozen models are trusted. Importing this module needs neither
vLLM nor the native module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from .address import HostPort
from .config_models import (
    BackendName,
    ConfigError,
    Direction,
    MigrationConfig,
    Number,
    ObjectiveName,
    Peer,
    PolicyConfig,
    SettingsModel,
    read_bounded,
    to_policy,
)
from .config_text import ENV_PREFIX, MISPLACED, environment, problems, show

__all__ = ["BackendName", "ConfigError", "Direction", "MigrationConfig", "ObjectiveName", "PegaConfig", "PolicyConfig",
           "RequestParams", "read_bounded"]  # fmt: skip


class PegaConfig(SettingsModel):
    """The whole of `kv_connector_extra_config`, every default filled in."""

    host_pool_gib: Literal["auto"] | Annotated[Number, Field(gt=0, le=1 << 20)] = Field(
        default="auto",
        title="host memory per worker rank, GiB. `auto`: twice the GPU's cache, at most a local rank's share of a "
        "quarter of the memory left",
        description='GiB of host memory per rank, above 0 and at most 1048576, or "auto"',
    )
    kv_layout: Literal["auto", "vllm", "block"] = Field(
        default="auto",
        title="`block` asks vLLM for a layout in which a block is one range; `vllm` and, for now, `auto` leave its own",
        description="auto, vllm or block",
    )
    load_policy: Annotated[PolicyConfig, BeforeValidator(to_policy)] = Field(
        default=PolicyConfig(),
        title="how blocks come back from the host pool",
        description="auto, memcpy, kernel, chunked, staged, or an object with `backend` and its limits",
    )
    save_policy: Annotated[PolicyConfig, BeforeValidator(to_policy)] = Field(
        default=PolicyConfig(),
        title="how they go there",
        description="auto, memcpy, kernel, chunked, staged, or an object with `backend` and its limits",
    )
    objective: ObjectiveName = Field(
        default="balanced",
        title="what `auto` optimises, from speed to the latency of decoding",
        description="throughput, balanced, tail or strict",
    )
    device_profile: str = Field(
        default="auto",
        title="measurements that `auto` decides by; `auto`: those of this GPU, else cautious ones",
        min_length=1,
        description='"auto", the name of a built-in profile, or the path of a JSON file',
    )
    eviction: Literal["lru"] = Field(default="lru", title="of the host pool", description="lru")
    save_decode: bool = Field(
        default=True, title="also save blocks that fill up while decoding", description="true or false"
    )
    transfer_timeout_s: Number = Field(
        default=30.0,
        title="a load that takes longer is given up, and its tokens are computed",
        ge=0.1,
        le=86400,
        description="seconds, from 0.1 to 86400",
    )
    max_pending_save_blocks: Literal["auto"] | Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        default="auto",
        title="GPU blocks that saves may hold; above it saves wait, then are dropped and counted. `auto`: 5 % of the "
        "GPU's blocks, but at least the smaller of 64 and a quarter of them",
        description='a number of GPU blocks, 1 or more, or "auto"',
    )
    log_decisions: bool = Field(
        default=False,
        title="log each new kind of transfer once, with the reason for its backend",
        description="true or false",
    )
    migration: MigrationConfig | None = Field(
        default=None,
        title="fetching KV from other instances; absent: off",
        description="an object with at least `listen`, or null",
    )

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any] | None, env: Mapping[str, str] = os.environ) -> PegaConfig:
        """Validates the settings, the environment's overrides applied.

        `extra` is vLLM's `kv_connector_extra_config`. `VLLM_PEGA_<KEY>` overrides the scalar key of that name;
        an empty variable counts as unset. Raises ConfigError with every problem found.
        """
        if extra is None:
            extra = {}
        if not isinstance(extra, Mapping):
            raise ConfigError([f"kv_connector_extra_config: got {show(extra)}; allowed: a JSON object"])
        overrides, wrong = environment(env, cls.model_fields)
        try:
            config = cls.model_validate({**extra, **overrides})
        except ValidationError as error:
            wrong += problems(cls, error, {key: f"{ENV_PREFIX}{key.upper()}" for key in overrides}, MISPLACED)
        if wrong:
            raise ConfigError(wrong)
        return config

    def policy(self, direction: Direction) -> PolicyConfig:
        return self.load_policy if direction == "load" else self.save_policy


# --- per request ----------------------------------------------------------------------------------------------

_MAX_PROBLEMS = 8  # a client may send anything, and each problem is logged


class RequestModel(SettingsModel):
    source: Peer | None = Field(
        default=None,
        title="the migration agent of an instance that may hold this request's KV",
        description='the "host:port" of an agent, IPv6 in brackets',
    )
    load_policy: Annotated[PolicyConfig, BeforeValidator(to_policy)] | None = Field(
        default=None,
        title="the instance's, for this request alone",
        description=PegaConfig.model_fields["load_policy"].description,
    )
    save_policy: Annotated[PolicyConfig, BeforeValidator(to_policy)] | None = Field(
        default=None,
        title="the instance's, for this request alone",
        description=PegaConfig.model_fields["save_policy"].description,
    )
    save: bool = Field(default=True, title="`false`: this request's blocks are not saved", description="true or false")
    # What we hand out with a finished request, so that a proxy may hand it on unchanged.
    blocks: int | None = Field(
        default=None,
        title="ignored; an instance's answer carries it, and may be handed on unchanged",
        ge=0,
        description="an integer, 0 or more",
    )
    fingerprint: str | None = Field(default=None, title="as `blocks`", description="a string")


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
            return cls(problems=(f"kv_transfer_params: got {show(kv_transfer_params)}; allowed: an object",))
        pega = kv_transfer_params.get("pega")
        if pega is None:
            return cls()
        if not isinstance(pega, Mapping):
            return cls(problems=(f"kv_transfer_params.pega: got {show(pega)}; allowed: an object",))
        try:
            values, wrong = _salvage(dict(pega))
        except Exception as error:  # whatever a client has found, its request alone goes without parameters
            return cls(problems=(f"kv_transfer_params.pega: unreadable ({type(error).__name__})",))
        if values.source is not None and config.migration is None:
            wrong.append("source: migration is not configured on this instance")
        return cls(
            source=values.source if config.migration is not None else None,
            load_policy=values.load_policy,
            save_policy=values.save_policy,
            save=values.save,
            fingerprint=values.fingerprint,
            problems=tuple(wrong[:_MAX_PROBLEMS]),
        )


def _salvage(given: dict[Any, Any]) -> tuple[RequestModel, list[str]]:
    """Keeps what is right, and says what was left out as wrong."""
    try:
        return RequestModel.model_validate(given), []
    except ValidationError as error:
        wrong = {item["loc"][0] for item in error.errors()}
        good = {key: value for key, value in given.items() if key in RequestModel.model_fields and key not in wrong}
        return RequestModel.model_validate(good), problems(RequestModel, error, {}, {})
