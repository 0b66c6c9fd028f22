# SPDX-License-Identifier: Apache-2.0
"""Puts migration together once the workers' pools are known: descriptors, the agent's spec, the scheduler's side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm_pega_connector.address import HostPort
from vllm_pega_connector.config import MigrationConfig
from vllm_pega_connector.migration.client import AgentClient
from vllm_pega_connector.migration.hook import Migration
from vllm_pega_connector.migration.protocol import Pool, Spec
from vllm_pega_connector.migration.security import default_sources
from vllm_pega_connector.migration.share import PoolShare

WILDCARDS = ("0.0.0.0", "::")


def data_host(config: MigrationConfig) -> str:
    """The address under which Mooncake's engine is known: what peers reach, never a wildcard."""
    if config.advertise is not None:
        return config.advertise.host
    return (
        "127.0.0.1" if config.listen.host == "0.0.0.0" else "::1" if config.listen.host == "::" else config.listen.host
    )


def advertised(config: MigrationConfig, port: int) -> HostPort:
    """Where peers reach the agent that listens on `port`."""
    if config.advertise is not None:
        return HostPort(config.advertise.host, config.advertise.port or port)
    return HostPort(data_host(config), port)


def start(
    config: MigrationConfig,
    index: Any,
    group: int,
    slot_class: int,
    key_bytes: int,
    slots: int,
    pools: Sequence[tuple[PoolShare, list[tuple[int, int]]]],
    fingerprint: Callable[[], dict[str, str]],
) -> Migration:
    """`pools`: by rank, in an order that all instances share: the share and its (slot bytes, slots) classes.

    `fingerprint` is called in a thread and may wait. Raises OSError, RuntimeError or ConfigError with what to change.
    """
    from vllm_pega_connector._native import HostPool, SlotTable

    token = config.auth_token()
    own = [config.listen, *([config.advertise] if config.advertise else [])]
    allowed = config.allow_sources
    opened: list[tuple[int, int]] = []
    try:
        for share, _ in pools:
            opened.append(share.open())
        attached = [HostPool.attach(*fds, classes) for fds, (_, classes) in zip(opened, pools, strict=True)]
    except (OSError, ValueError):
        for fds in opened:
            for fd in fds:
                os.close(fd)
        raise
    index.honour_leases(slot_class, attached[0])

    def spec() -> Spec:
        return Spec(
            pools=[Pool(*fds, classes) for fds, (_, classes) in zip(opened, pools, strict=True)],
            slot_class=slot_class,
            key_bytes=key_bytes,
            slots=slots,
            fingerprint=fingerprint(),
            listen_host=config.listen.host,
            listen_port=config.listen.port,
            data_host=data_host(config),
            allow_sources=list(allowed) if allowed is not None else default_sources(config.peers, own),
            token=token,
            transport=config.transport,
            timeout_s=config.timeout_s,
            verify=config.verify,
            same_host=config.same_host == "auto",
        )

    client = AgentClient(spec, [fd for fds in opened for fd in fds])
    tables = [SlotTable(pool, slot_class, key_bytes) for pool in attached]
    return Migration(index, group, tables, slots, client, config.peers, config.timeout_s)
