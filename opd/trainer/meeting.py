"""Where ranks meet: torch's store and gloo's sockets, which listen on every address of a machine unless they are told otherwise.

Neither asks for a token, so they stay on loopback where all ranks are on one machine, and otherwise on the network of MASTER_ADDR where that is
an address and no name. The store of torchrun is its own, and NCCL's sockets are those of NCCL_SOCKET_IFNAME.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

GET_ADDRESS = 0x8915  # SIOCGIFADDR
INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


def meet(patience: timedelta) -> tuple[Any, int, int]:
    """The store of the ranks that a launcher has started, the number of this one, and how many there are."""
    host, rank, size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if (found := interface_of(LOOPBACK if alone else host)) is not None:
        os.environ.setdefault(INTERFACE, found)
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _is_address(host):
        return next(dist.rendezvous("env://", timeout=patience))
    return _store(host, int(os.environ["MASTER_PORT"]), size, patience), rank, size


@cache  # a process may carry out several runs
def _store(host: str, port: int, size: int, patience: timedelta) -> dist.TCPStore:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening: int | None = socket.create_server((host, port), family=family).detach()
    except OSError:  # an address that leads here from elsewhere, and is not this machine's: all of its own
        listening = None
    return dist.TCPStore(host, port, size, True, timeout=patience, multi_tenant=True, master_listen_fd=listening)


def interface_of(host: str) -> str | None:
    """By which this machine reaches an address; None for a name, which may mean another one on each machine."""
    if not _is_address(host) or ":" in host:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        with contextlib.suppress(OSError):  # no way leads there
            one.connect((host, 9))  # nothing is sent
        own = one.getsockname()[0]
        loopback = ipaddress.ip_address(own).is_loopback
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = socket.inet_ntoa(fcntl.ioctl(one, GET_ADDRESS, struct.pack("256s", name.encode()))[20:24])
                if found == own or (loopback and ipaddress.ip_address(found).is_loopback):
                    return name
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
