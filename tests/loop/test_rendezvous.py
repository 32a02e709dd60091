"""Ranks listen for each other on loopback, or on the network that they were told, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from opd.loop.distributed import interface_of, rendezvous
from tests.support.servers import free_port

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
LISTENING = "0A"


def listening() -> Iterator[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports on which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == LISTENING and f"socket:[{parts[9]}]" in own:
                address, port = parts[1].split(":")
                yield address, int(port, 16)


@pytest.mark.parametrize("local", ["1", None], ids=["one machine", "an address"])
def test_ranks_of_one_machine_listen_on_loopback(local: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**facts, "LOCAL_WORLD_SIZE": local, "GLOO_SOCKET_IFNAME": None}.items():
        monkeypatch.setenv(name, value or "")  # so that it is put back
        if value is None:
            monkeypatch.delenv(name)
    before = set(listening())
    store, rank, size = rendezvous(timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore("test", store), rank=rank, world_size=size)
    try:
        found = set(listening()) - before
    finally:
        dist.destroy_process_group()
    assert int(facts["MASTER_PORT"]) in {port for _, port in found}
    assert len(found) > 1  # gloo's, too
    assert {address for address, _ in found} == {"0100007F"}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_name_says_nothing_about_interfaces() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    assert interface_of("gpu-box") is interface_of("::1") is None
