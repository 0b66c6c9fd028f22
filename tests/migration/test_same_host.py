# SPDX-License-Identifier: Apache-2.0
"""Two agents of one machine: pools are read directly by those who may, and by Mooncake where that cannot be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mooncake.engine")

from tests.migration.support import SLOT_BYTES, Instance, key, u32
from vllm_pega_connector._native import HostPool, PeerPool
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.protocol import Door
from vllm_pega_connector.migration.same_host import MAX_VISITORS, Neighbour


@pytest.fixture(scope="module")
def source() -> Iterator[Instance]:
    with Instance(same_host=True) as made:
        made.store(range(20), [*range(10, 20), *range(40, 30, -1)])
        yield made


@pytest.fixture(scope="module")
def target() -> Iterator[Instance]:
    with Instance(same_host=True) as made:
        yield made


def door_of(source: Instance) -> Door:
    import zmq

    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 5000
        dealer.connect(f"tcp://{source.address}")
        dealer.send_multipart(protocol.frames(protocol.Lookup(1, source.spec.fingerprint, key(0), 0.0)))
        found: Any = protocol.parse(dealer.recv_multipart(), protocol.reply_decoder)
    context.term()
    assert isinstance(found.door, Door)
    return found.door


def holds_pool_of(source: Instance, agent: int | None) -> bool:
    """A process has the source's pool open."""
    pool = os.fstat(source.pools[0].data_fd).st_ino
    return any(f.exists() and f.stat().st_ino == pool for f in Path(f"/proc/{agent}/fd").iterdir())


def test_blocks_arrive_whole_and_in_their_slots(source: Instance, target: Instance) -> None:
    slots = [*range(5, 15), *range(30, 40)]
    end = target.pull(source.address, range(20), slots)
    assert (end.reason, end.path) == ("", "same_host") and end.published == b"\1" * 20 and end.unsafe == bytes(20)
    assert end.nbytes == 20 * SLOT_BYTES and set(end.seconds) == {"post", "lookup", "queue", "read", "validate"}
    assert all(target.holds(n, slot) for n, slot in enumerate(slots))


def test_every_rank_reads_from_its_own_and_with_a_token() -> None:
    spec: dict[str, Any] = {"ranks": 2, "same_host": True, "token": b"a long secret", "verify": True}
    with Instance(**spec) as source, Instance(**spec) as target:
        source.store(range(6), range(6))
        end = target.pull(source.address, range(6), range(20, 26))
        assert end.path == "same_host" and end.published == b"\1" * 6
        assert all(target.holds(n, 20 + n) for n in range(6))


def test_large_blocks_and_several_threads() -> None:
    size = (5 << 20) + 4096
    spec: dict[str, Any] = {"slots": 12, "slot_bytes": size, "same_host": True}
    with Instance(**spec) as source, Instance(**spec) as target:
        source.store(range(6), [2, 4, 6, 7, 8, 0])
        end = target.pull(source.address, range(6), [7, 1, 0, 9, 10, 3])
        assert end.path == "same_host" and end.published == b"\1" * 6
        assert all(target.holds(n, slot) for n, slot in enumerate([7, 1, 0, 9, 10, 3]))
        # The same bytes again by as many threads as have something to do.
        theirs = PeerPool(source.pools[0].data_fd, 0, size, 12)
        assert theirs.read(u32([2, 4, 6, 7, 8, 0]), target.pools[0], 0, u32([7, 1, 0, 9, 10, 3]), 16)
        assert all(target.holds(n, slot) for n, slot in enumerate([7, 1, 0, 9, 10, 3]))


def test_either_side_can_turn_it_off(source: Instance, target: Instance) -> None:
    with Instance() as off:
        off.store(range(4), range(4))
        assert target.pull(off.address, range(4), range(4)).path == "network"
        end = off.pull(source.address, range(10, 14), range(10, 14))
        assert end.path == "network" and end.published == b"\1" * 4


def test_what_cannot_be_read_directly_comes_by_mooncake(source: Instance) -> None:
    door = door_of(source)
    visitors: list[Neighbour] = []
    try:
        with pytest.raises((OSError, ValueError)):
            while True:
                visitors.append(Neighbour(door, 1, SLOT_BYTES))
        assert MAX_VISITORS - 2 <= len(visitors) <= MAX_VISITORS  # others of these tests may be there
        with Instance(same_host=True) as late:
            end = late.pull(source.address, range(4), range(4))
            assert end.path == "network" and end.published == b"\1" * 4 and late.holds(3, 3)
            assert late.pull(source.address, range(4, 8), range(4, 8)).path == "network"  # each door is tried once
    finally:
        for visitor in visitors:
            visitor.connection.close()


def test_the_pool_is_given_up_when_its_agent_ends(target: Instance) -> None:
    with Instance(same_host=True) as other:
        other.store(range(4), range(4))
        assert target.pull(other.address, range(4), range(50, 54)).path == "same_host"
        assert holds_pool_of(other, target.client.pid)
        other.client.kill()
        target.wait(lambda: not holds_pool_of(other, target.client.pid))
        # The next agent has another door.
        other.wait(lambda: other.client.starts == 2 and other.client.ready)
        target.wait(lambda: target.pull(other.address, range(4), range(54, 58)).path == "same_host")
        assert target.holds(3, 57)


def test_nothing_without_the_secret_and_nothing_to_write_with_it(source: Instance) -> None:
    door = door_of(source)
    for ticket in (b"", bytes(32), door.ticket[:-1], door.ticket + b"\0"):
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(5)
            visitor.connect(f"\0{door.name}")
            visitor.sendall(ticket)
            visitor.shutdown(socket.SHUT_WR)
            assert socket.recv_fds(visitor, 64, 1)[:2] == (b"", [])
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.settimeout(5)
        visitor.connect(f"\0{door.name}")
        visitor.sendall(door.ticket)
        _, (file,), _, _ = socket.recv_fds(visitor, 64, 1)
        try:
            with pytest.raises(OSError):
                os.pwrite(file, b"x", 0)
            assert os.pread(file, SLOT_BYTES, 10 * SLOT_BYTES) == bytes(source.pools[0].slot_view(0, 10))
        finally:
            os.close(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")
def test_another_user_gets_nothing(source: Instance) -> None:
    door = door_of(source)
    script = (
        "import os, socket, sys\n"
        "os.setuid(int(sys.argv[3]))\n"
        "with socket.socket(socket.AF_UNIX) as s:\n"
        "    s.settimeout(5); s.connect('\\0' + sys.argv[1])\n"
        "    try: s.sendall(bytes.fromhex(sys.argv[2])); print(socket.recv_fds(s, 64, 1)[:2])\n"
        "    except ConnectionError: print((b'', []))"
    )

    def ask(user: int) -> str:
        command = [sys.executable, "-c", script, door.name, door.ticket.hex(), str(user)]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    assert ask(0).startswith("(b'\\x00")
    assert ask(65534) == "(b'', [])\n"


def test_nobody_is_met_behind_a_name_that_is_not_an_agents() -> None:
    for name in ("pega-", "/run/x", "pega-" + "0" * 33):
        with pytest.raises(ValueError, match="no name"):
            Neighbour(Door(name, bytes(32)), 1, SLOT_BYTES)
    with pytest.raises(ConnectionRefusedError):
        Neighbour(Door("pega-" + "0" * 32, bytes(32)), 1, SLOT_BYTES)


def test_only_sealed_memory_files_that_hold_all_slots(tmp_path: Path) -> None:
    pool = HostPool([(64, 8)])
    PeerPool(pool.data_fd, 0, 64, 8)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 8 * 64)
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(8 * 64)
        for fd, words in ((unsealed, "fixed size"), (file.fileno(), "fixed size"), (10_000, "fixed size")):
            with pytest.raises(ValueError, match=words):
                PeerPool(fd, 0, 64, 8)
    os.close(unsealed)
    for offset, size, slots in ((0, 64, 65), (4096, 64, 1), (2**63, 64, 1), (0, 0, 1), (0, 64, 2**40)):
        with pytest.raises(ValueError, match=r"bytes|no such slots"):
            PeerPool(pool.data_fd, offset, size, slots)
    theirs, ours = PeerPool(pool.data_fd, 0, 64, 8), HostPool([(64, 4), (32, 4)])
    for from_slot, slot_class, slot in ((8, 0, 0), (0, 0, 4), (0, 1, 0), (0, 2, 0)):
        with pytest.raises(ValueError):
            theirs.read(u32([from_slot]), ours, slot_class, u32([slot]), 1)
    assert theirs.read(b"", ours, 0, b"", 1) and theirs.read(u32([7]), ours, 0, u32([3]), 1)
