# SPDX-License-Identifier: Apache-2.0
"""Network endpoints as people write them: "host:port" with IPv6 in brackets, hosts, CIDR blocks."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

# One label of a host name (RFC 1123; the underscore is common inside clusters).
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


@dataclass(frozen=True)
class HostPort:
    """An endpoint. `str()` gives `host:port`, with IPv6 in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Reads "host:port", "1.2.3.4:port" or "[v6]:port". Raises ValueError saying what is wrong."""
        match = re.fullmatch(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^\[\]:]+)):(?P<port>[0-9]{1,5})", text)
        if match is None:
            mend = "put the IPv6 address in brackets" if text.count(":") > 1 and "[" not in text else "give host:port"
            raise ValueError(mend)
        port = int(match["port"])
        if port > 65535:
            raise ValueError("the port is above 65535")
        if match["v6"] is not None:
            try:
                return cls(str(ipaddress.IPv6Address(match["v6"])), port)
            except ValueError:
                raise ValueError(f"{match['v6']!r} is no IPv6 address") from None
        return cls(parse_host(match["name"]), port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host(text: str) -> str:
    """A host name or IP address, in canonical form. Raises ValueError."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        labels = text.removesuffix(".").split(".")
        # A name that ends in digits is a mistyped IPv4 address (RFC 1123 forbids such names).
        if len(text) > 253 or labels[-1].isdigit() or not all(_LABEL.fullmatch(label) for label in labels):
            raise ValueError(f"{text!r} is neither a host name nor an IP address") from None
        return text.lower()


def parse_source(value: str) -> str:
    """A host, an address or a CIDR block, in canonical form. Raises ValueError."""
    if "/" not in value:
        return parse_host(value.removeprefix("[").removesuffix("]"))
    try:
        return str(ipaddress.ip_network(value, strict=True))
    except ValueError as error:
        raise ValueError(str(error)) from None
