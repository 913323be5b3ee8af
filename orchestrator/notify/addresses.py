"""Which addresses the service may be made to connect to by somebody who names a URL.

Names are judged by what they resolve to, never by how they look: `2130706433`, `127.1` and a public name with a private
address are all the address that the connection would go to. Pure; resolving and connecting are the sender's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from orchestrator.domain.errors import FieldProblem, Refused

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
MAX_URL = 2000
_CHARACTERS = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+")
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PORTS = {"https": 443, "http": 80}
_ALSO_REFUSED: tuple[Network, ...] = (
    ip_network("168.63.129.16/32"),  # a cloud's host, though its address is a public one
    ip_network("192.0.0.0/24"),  # protocol assignments, and another cloud's metadata
    ip_network("192.88.99.0/24"),
    ip_network("fec0::/10"),
    ip_network("100::/64"),
)
_NAT64 = (ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """http: whether a scheme without TLS is allowed. networks: that may be reached though others of their kind may not."""

    http: bool = False
    networks: tuple[Network, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """host: as the URL has it, without brackets. path: with the query, as it is sent."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def target_of(url: str, reach: Reach) -> Target:
    """Raises Refused, which says nothing of the URL back: people keep secrets in them."""
    if len(url) > MAX_URL or _CHARACTERS.fullmatch(url) is None:
        raise _refused(f"must be an address of at most {MAX_URL} ASCII characters that URLs may have")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _refused("is no URL") from None
    schemes = ("https", "http") if reach.http else ("https",)
    if parts.scheme not in schemes:
        raise _refused(f"must begin with {' or '.join(f'{one}://' for one in schemes)}")
    if "@" in parts.netloc:
        raise _refused("may hold no user name or password; messages are signed instead")
    if "#" in url:
        raise _refused("may have no part after a #, which is never sent")
    host = parts.hostname or ""
    if not _is_host(host) or port == 0:
        raise _refused("must name a host, and a port of 1..65535 where it names one")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    found = Target(scheme=parts.scheme, host=host, port=port or _PORTS[parts.scheme], path=path)
    literal = _literal(host)
    if literal is not None:
        require_allowed((literal,), reach)
    return found


def require_allowed(addresses: Sequence[Address], reach: Reach) -> None:
    """Every one of them: a name that stands for a public and a private address is out to be mistaken. Raises Refused."""
    for address in addresses:
        if not is_allowed(address, reach):
            raise _refused(
                f"leads to {address}, which is no public address; list its network under webhooks.networks in the "
                "service's configuration if it is to be reached"
            )


def is_allowed(address: Address, reach: Reach) -> bool:
    inner = _within(address)
    if any(one.version == net.version and one in net for net in reach.networks for one in (inner or address,)):
        return True
    if inner is not None:
        return is_allowed(inner, reach)
    is_odd = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    is_odd = is_odd or address.is_link_local or address.is_private
    also = any(address.version == net.version and address in net for net in _ALSO_REFUSED)
    return address.is_global and not is_odd and not also


def _within(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for: mapped, compatible, 6to4, Teredo, NAT64."""
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in net for net in _NAT64) or (int(address) >> 32 == 0 and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_host(host: str) -> bool:
    if ":" in host:
        return "%" not in host and _literal(host) is not None
    return len(host) <= 253 and _NAME.fullmatch(host) is not None


def _refused(message: str) -> Refused:
    return Refused(f"url {message}", (FieldProblem(field="url", value="", message=message),))
