# SPDX-License-Identifier: Apache-2.0
"""`pega agent`: a migration agent without an engine, to try ports, libraries, tokens; or a question to a running one.

The connector starts the agents of instances itself.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from .address import HostPort
from .cli_config import parse_object, read_argument
from .config import ConfigError, MigrationConfig, PegaConfig

START_TIMEOUT_S = 60.0
SLOT_BYTES, SLOTS = 64 << 10, 16  # of the pool that an agent alone offers: it holds nothing


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "agent",
        help="try a migration agent alone, or ask a running one who it is",
        description="Runs a migration agent over an empty pool until interrupted, or asks a running one who it is. "
        "The agents of vLLM instances are started by the connector.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "settings", metavar="JSON", nargs="?", help="the `migration` object of the configuration, or a file"
    )
    parser.add_argument("--ask", metavar="HOST:PORT", help="ask the agent there for its fingerprint instead")
    parser.add_argument("--token-file", metavar="FILE", help="with --ask: the shared token")
    parser.add_argument("--once", action="store_true", help="end as soon as the agent listens")
    parser.set_defaults(run=run, command="agent")


def run(args: Any) -> int:
    if (args.settings is None) == (args.ask is None):
        raise ConfigError(
            ['give either the `migration` object, such as \'{"listen": "0.0.0.0:7100"}\', or --ask HOST:PORT']
        )
    if args.ask is not None:
        return _ask(args.ask, args.token_file)
    settings = parse_object(read_argument(args.settings))
    config = PegaConfig.from_extra_config({"migration": settings}, env={}).migration
    assert config is not None
    return _run(config, args.once)


def _run(config: MigrationConfig, once: bool) -> int:
    from ._native import HostPool, SlotIndex
    from .guard import logger
    from .migration.share import PoolShare
    from .migration.start import advertised, start

    classes = [(SLOT_BYTES, SLOTS)]
    pool = HostPool(classes)
    share = PoolShare.of(pool.data_fd, pool.table_fd)
    index = SlotIndex([SLOTS], [0])
    fingerprint = {"model": config.model_id or "none: an agent without an engine"}
    logger.setLevel(logging.ERROR)  # why there is no agent is said below, once
    migration = start(config, index, 0, 0, 32, SLOTS, [(share, classes)], lambda: fingerprint)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not migration.port:
            migration.poll()
            if migration.failure or time.monotonic() > deadline:
                print(f"pega agent: {migration.failure or 'it does not start'}", file=sys.stderr)
                return 1
            time.sleep(0.01)
        logger.setLevel(logging.NOTSET)
        print(f"listening; peers reach it at {advertised(config, migration.port)}", flush=True)
        while not once:
            migration.poll()
            time.sleep(0.5)
        return 0
    finally:
        migration.close()


def _ask(text: str, token_file: str | None) -> int:
    import zmq

    from .migration import protocol
    from .migration.security import Keys

    try:
        address = HostPort.parse(text)
    except ValueError as error:
        raise ConfigError([f"--ask: got {text!r} ({error}); allowed: HOST:PORT, IPv6 in brackets"]) from None
    token = MigrationConfig(listen=address, auth_token_file=token_file).auth_token()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IPV6, 1)
    dealer.linger, dealer.rcvtimeo = 0, 3000
    try:
        if token is not None:
            Keys.derive(token).present(dealer)
        dealer.connect(f"tcp://{address}")
        dealer.send_multipart(protocol.frames(protocol.Ping(1)))
        reply = protocol.parse(dealer.recv_multipart(), protocol.reply_decoder)
    except zmq.Again:
        print(f"pega agent: {address} did not answer: nobody there, another version, or another token", file=sys.stderr)
        return 1
    except protocol.ProtocolError as error:
        print(f"pega agent: {address} answered with {error}", file=sys.stderr)
        return 1
    finally:
        dealer.close()
        context.term()
    if not isinstance(reply, protocol.Pong):
        print(f"pega agent: {address} answered with {type(reply).__name__}", file=sys.stderr)
        return 1
    print(
        json.dumps({"fingerprint": reply.fingerprint, "slots": reply.slots, "slot_bytes": reply.slot_bytes}, indent=2)
    )
    return 0
