"""A switch and machines behind it, as network namespaces: links to cut, to slow down and to make deaf one way.

    this namespace ── root ┐
    host 1: eth0 ───── h1 ─┤ bridge, in a namespace of its own: nothing of it is in this one but the other end of `root`,
    host 2: eth0 ───── h2 ─┘ and removing the namespaces removes everything

It knows nothing of Ray and jobs. Needs root, ip and iptables.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass

ROOT = 0
"""The number of this namespace among the hosts."""


class NoRig(Exception):
    """Why there can be none here."""


@dataclass(frozen=True, slots=True)
class Rig:
    """hosts: how many, numbered from 1. Addresses are net.1 for this namespace and net.(10 + number) for each host."""

    tag: str
    net: str
    hosts: int

    @classmethod
    def build(cls, hosts: int) -> Rig:
        """Raises NoRig where namespaces are not to be had; nothing is left then."""
        _require()
        rig = cls(tag=f"es{secrets.token_hex(3)}", net=_free_net(), hosts=hosts)
        try:
            rig._wire()
        except subprocess.CalledProcessError as error:
            rig.remove()
            raise NoRig(f"network namespaces cannot be made here: {error.stderr.strip()}") from error
        except BaseException:
            rig.remove()
            raise
        return rig

    def remove(self) -> None:
        """Everything, also where it was half made or is gone already. Whatever runs in a namespace must have ended."""
        for name in self._namespaces():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        # Going with the switch's namespace takes the kernel a moment.
        subprocess.run(["ip", "link", "del", self.tag], check=False, capture_output=True)

    def leftovers(self) -> list[str]:
        """What there still is of it."""
        links = [link["ifname"] for link in json.loads(_ip("-j", "link", "show"))]
        return [*self._namespaces(), *(name for name in links if name.startswith(self.tag))]

    def address(self, host: int) -> str:
        return f"{self.net}.{10 + host if host else 1}"

    def prefix(self, host: int) -> tuple[str, ...]:
        """Words before a command that is to run on a host."""
        return ("ip", "netns", "exec", self._namespace(host))

    # --- trouble ----------------------------------------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Pull its plug: whatever is sent to it or by it is lost, and nobody is told."""
        self._port(host, "down")

    def join(self, host: int) -> None:
        self._port(host, "up")

    def deafen(self, host: int, to: int) -> None:
        """`host` does not hear `to` any more, which still hears it."""
        self._filter(host, "-A", to)

    def undeafen(self, host: int, to: int) -> None:
        self._filter(host, "-D", to)

    def slow(self, host: int, mbit: float) -> None:
        """At most this much in each direction."""
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "64k", "latency", "200ms")
        _run("tc", "-n", self._switch, "qdisc", "replace", "dev", _port_name(host), *shape)
        _run("tc", "-n", self._namespace(host), "qdisc", "replace", "dev", "eth0", *shape)

    def quicken(self, host: int) -> None:
        _run("tc", "-n", self._switch, "qdisc", "del", "dev", _port_name(host), "root")
        _run("tc", "-n", self._namespace(host), "qdisc", "del", "dev", "eth0", "root")

    # ----------------------------------------------------------------------------------------------------------------------

    @property
    def _switch(self) -> str:
        return f"{self.tag}-sw"

    def _namespace(self, host: int) -> str:
        return f"{self.tag}-h{host}"

    def _namespaces(self) -> list[str]:
        found = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]
        return [name for name in found if name.startswith(f"{self.tag}-")]

    def _wire(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        _ip("link", "add", self.tag, "type", "veth", "peer", "name", _port_name(ROOT), "netns", self._switch)
        _ip("addr", "add", f"{self.address(ROOT)}/24", "dev", self.tag)
        _ip("link", "set", self.tag, "up")
        self._plug_in(ROOT)
        for host in range(1, self.hosts + 1):
            name, port = self._namespace(host), _port_name(host)
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            self._plug_in(host)

    def _plug_in(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", _port_name(host), "master", "bridge")
        self._port(host, "up")

    def _port(self, host: int, state: str) -> None:
        _ip("-n", self._switch, "link", "set", _port_name(host), state)

    def _filter(self, host: int, action: str, sender: int) -> None:
        _run(*self.prefix(host), "iptables", "-w", action, "INPUT", "-s", self.address(sender), "-j", "DROP")


def _port_name(host: int) -> str:
    return f"h{host}" if host else "root"


def _require() -> None:
    if os.geteuid() != 0:
        raise NoRig("they need root, to make network namespaces")
    missing = [tool for tool in ("ip", "tc", "iptables") if shutil.which(tool) is None]
    if missing:
        raise NoRig(f"{' and '.join(missing)} not in PATH; install iproute2 and iptables")


def _free_net() -> str:
    """A /24 of the private 10.0.0.0/8 that this machine has no route to but its default one."""
    routes = _ip("route")
    for _ in range(100):
        net = f"10.{16 + secrets.randbelow(200)}.{secrets.randbelow(250)}"
        if net.rsplit(".", 1)[0] not in routes:
            return net
    raise NoRig("no private network is free")


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
