# SPDX-License-Identifier: Apache-2.0
"""Who may talk to whom: the shared token (libzmq's CURVE) and the hosts that may be named as a source."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from vllm_pega_connector.address import HostPort

RESOLVE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Keys:
    """A CURVE key pair for each role. Only who knows the token has either."""

    server: tuple[bytes, bytes]  # (public, secret), z85
    client: tuple[bytes, bytes]

    @classmethod
    def derive(cls, token: bytes) -> Keys:
        """Raises RuntimeError if this libzmq has no CURVE."""
        if not zmq.has("curve"):
            raise RuntimeError(
                "migration.auth_token_file needs a libzmq with CURVE: pip install --force-reinstall pyzmq"
            )
        pairs = []
        for role in (b"server", b"client"):
            # The token may be a short phrase: scrypt makes guessing it from recorded traffic expensive.
            secret = hashlib.scrypt(token, salt=b"vllm-pega-connector/" + role, n=1 << 14, r=8, p=1, dklen=32)
            encoded = z85.encode(secret)
            pairs.append((zmq.curve_public(encoded), encoded))
        return cls(*pairs)

    def guard(self, server: zmq.Socket) -> None:
        """Makes a socket, before it binds, accept only clients that prove the token (with `Authenticator`)."""
        server.curve_server = True
        server.curve_secretkey = self.server[1]
        server.curve_publickey = self.server[0]
        server.zap_domain = b"pega"

    def present(self, client: zmq.Socket) -> None:
        """Makes a socket, before it connects, prove the token and accept only a server that has it."""
        client.curve_serverkey = self.server[0]
        client.curve_publickey, client.curve_secretkey = self.client


def authenticate(zap: zmq.Socket[bytes], allowed: bytes) -> None:
    """libzmq asks here (RFC 27) for every handshake: only the client key of our token passes. Never returns."""
    public = z85.decode(allowed)
    while True:
        version, request, *rest = zap.recv_multipart()
        good = len(rest) == 5 and rest[3] == b"CURVE" and rest[4] == public
        status = [b"200", b"OK"] if good else [b"400", b"no such key"]
        zap.send_multipart([version, request, *status, b"", b""])


class AllowedSources:
    """The hosts and CIDR blocks that a request may name."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                self._names.add(entry.lower())

    def _covers(self, address: str) -> bool:
        ip = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None)
        ip = mapped or ip
        return any(ip.version == network.version and ip in network for network in self._networks)

    async def resolve(self, source: HostPort) -> HostPort | None:
        """An address of an allowed source, to be connected to as it is; None if it is not allowed.

        A name counts if it is listed itself, or if every address it has is covered. Raises OSError if it has none.
        """
        try:
            ipaddress.ip_address(source.host)
        except ValueError:
            pass
        else:
            return source if source.host in self._names or self._covers(source.host) else None
        loop = asyncio.get_running_loop()
        if source.host not in self._names and not self._networks:
            return None
        try:
            found = await asyncio.wait_for(
                loop.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM), RESOLVE_TIMEOUT_S
            )
        except asyncio.TimeoutError:
            raise OSError(f"{source.host} was not resolved within {RESOLVE_TIMEOUT_S:g} s") from None
        addresses = [str(entry[4][0]) for entry in found]
        if source.host not in self._names and not all(self._covers(a) for a in addresses):
            return None
        return HostPort(addresses[0], source.port)


def default_sources(peers: Sequence[HostPort], own: Iterable[HostPort]) -> list[str]:
    """`peers` and this host."""
    hosts = [p.host for p in peers] + ["localhost", "127.0.0.0/8", "::1", socket.gethostname().lower()]
    hosts += [h.host for h in own if h.host not in ("0.0.0.0", "::")]
    return list(dict.fromkeys(hosts))
