# SPDX-License-Identifier: Apache-2.0
"""Sources that die, freeze, change or were never agents: pulls end in time and nothing wrong is believed."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

pytest.importorskip("mooncake.engine")

from tests.migration.support import Instance, content, key, u32
from vllm_pega_connector.migration import protocol

BIG = 4 << 20  # so that a read of a whole pool takes a second or so and can be caught in the middle
BIG_SLOTS = 96


@pytest.fixture
def source() -> Iterator[Instance]:
    with Instance() as made:
        yield made


@pytest.fixture(scope="module")
def target() -> Iterator[Instance]:
    with Instance() as made:
        yield made
        with Instance() as source:  # whatever it went through, it still works
            source.store(range(4), range(4))
            assert made.pull(source.address, range(4), range(60, 64)).published == b"\1" * 4
        assert made.client.starts == 1


@contextmanager
def listener(answer: bytes = b"") -> Iterator[str]:
    """A port that accepts, says `answer`, and then nothing more."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                    connection.sendall(answer)
                except OSError:
                    return
                held.append(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()
        thread.join()


def refused_quickly(target: Instance, address: str, reason: str, within_s: float) -> None:
    start = time.monotonic()
    end = target.pull(address, range(8), range(8), timeout_s=5.0)
    assert end.reason.startswith(reason), end.reason
    assert time.monotonic() - start < within_s
    assert not any(end.published) and not any(end.unsafe)


def test_nobody_there(target: Instance) -> None:
    refused_quickly(target, "127.0.0.1:9", "unreachable:", 1.5)


def test_a_name_that_does_not_exist(target: Instance) -> None:
    with Instance(allow_sources=["no-such-host.invalid"]) as lost:
        refused_quickly(lost, "no-such-host.invalid:9000", "unresolved:", 4.0)


def test_a_port_that_accepts_and_stays_silent(target: Instance) -> None:
    with listener() as address:
        refused_quickly(target, address, "no_answer:", 4.0)


def test_a_port_that_talks_nonsense(target: Instance) -> None:
    with listener(random.Random(0).randbytes(4096)) as address:
        refused_quickly(target, address, "bad_answer:", 4.0)


def test_a_source_that_is_not_allowed_is_not_contacted() -> None:
    with (
        Instance(allow_sources=["10.0.0.0/8", "some-name"]) as strict,
        closing(socket.create_server(("127.0.0.1", 0))) as trap,
    ):
        trap.setblocking(False)
        for host in ("127.0.0.1", "localhost"):
            refused_quickly(strict, f"{host}:{trap.getsockname()[1]}", "not_allowed:", 4.0)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_two_thousand_pulls_against_a_dead_peer(target: Instance) -> None:
    start, pid = time.monotonic(), target.client.pid
    for wave in range(20):
        pulls = [target.post("127.0.0.1:10", range(4), range(4)) for _ in range(100)]
        ends = [target.ended(p) for p in pulls]
        assert all(e.reason.split(":")[0] in ("unreachable", "backoff") for e in ends), wave
        assert not any(any(e.unsafe) for e in ends)
    assert time.monotonic() - start < 30
    assert target.client.pid == pid
    assert len(os.listdir(f"/proc/{pid}/fd")) < 100 and len(os.listdir(f"/proc/{pid}/task")) < 100


def test_random_and_truncated_bytes_on_the_control_port(source: Instance, target: Instance) -> None:
    source.store(range(4), range(4))
    host, port = "127.0.0.1", source.client.port
    rng = random.Random(1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x04\x19\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    for i in range(60):
        with closing(socket.create_connection((host, port))) as connection:
            good = [
                b"",
                greeting[: rng.randrange(64)],
                greeting + ready[: rng.randrange(len(ready))],
                greeting + ready,
            ][i % 4]
            connection.sendall(good + rng.randbytes(rng.randrange(2000)))
    assert target.pull(source.address, range(4), range(4)).published == b"\1" * 4
    assert source.client.starts == 1


def test_messages_that_nobody_should_send(source: Instance, target: Instance) -> None:
    import zmq

    source.store(range(4), range(4))
    pull = protocol.frames(protocol.Lookup(1, source.spec.fingerprint, key(0), 1.0))
    bad: list[tuple[list[bytes], str]] = [
        ([b"pega-migration/9", pull[1]], "version"),
        ([pull[1]], "frames"),
        ([pull[0], pull[1][:-1]], "unreadable"),
        ([pull[0], b"\xc1" * 100], "unreadable"),
        ([pull[0], b"\x91" * 100_000], "unreadable"),
        (protocol.frames(protocol.Lookup(2, source.spec.fingerprint, b"odd", 1.0)), "keys"),
        (protocol.frames(protocol.Lookup(3, source.spec.fingerprint, key(0), float("nan"))), "lease_s"),
        (protocol.frames(protocol.Lookup(4, source.spec.fingerprint, bytes(32 * 40_000), 1.0)), "keys"),
        (protocol.frames(protocol.Validate(5, u32([999]), bytes(8))), "slot 999"),
        (protocol.frames(protocol.Validate(6, u32([1]), bytes(7))), "generations"),
        (protocol.frames(protocol.Validate(7, b"odd", bytes(8))), "generations"),
    ]
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger, dealer.rcvtimeo = 0, 5000
        dealer.connect(f"tcp://{source.address}")
        for parts, word in bad:
            dealer.send_multipart(parts)
            reply = protocol.parse(dealer.recv_multipart(), protocol.reply_decoder)
            assert isinstance(reply, protocol.Refused) and word in reply.reason, (word, reply)
        dealer.send_multipart(protocol.frames(protocol.Ping(8)))
        assert isinstance(protocol.parse(dealer.recv_multipart(), protocol.reply_decoder), protocol.Pong)
        dealer.close()
    finally:
        context.term()
    assert target.pull(source.address, range(4), range(4)).published == b"\1" * 4


def test_a_source_that_was_killed_before(source: Instance, target: Instance) -> None:
    source.store(range(8), range(8))
    assert target.pull(source.address, range(8), range(8)).published == b"\1" * 8
    source.client.kill()
    start = time.monotonic()
    end = target.pull(source.address, range(8), range(10, 18))
    assert time.monotonic() - start < 5
    assert not any(end.published) or source.client.starts == 2  # on a busy machine the next one may be there in time
    # It comes back by itself, on the same port, with what its pool holds.
    source.wait(lambda: source.client.starts == 2 and source.client.ready)
    target.wait(lambda: target.pull(source.address, range(8), range(10, 18)).published == b"\1" * 8)


@pytest.fixture(params=["network", "same_host"])
def big_pair(request: pytest.FixtureRequest) -> Iterator[tuple[Instance, Instance]]:
    big: dict[str, Any] = {"slots": BIG_SLOTS, "slot_bytes": BIG, "same_host": request.param == "same_host"}
    with Instance(**big) as source, Instance(**big) as target:
        source.store(range(BIG_SLOTS), range(BIG_SLOTS), lambda n, rank: bytes([n + 1]) * BIG)
        yield source, target


@contextmanager
def during_a_read(source: Instance, target: Instance, timeout_s: float = 5.0) -> Iterator[int]:
    """A pull that is in the middle of its read: some of the first slot has arrived, not all of the last. Our agent
    stands still meanwhile."""
    pull, agent = target.post(source.address, range(BIG_SLOTS), range(BIG_SLOTS), timeout_s), target.client.pid
    assert agent is not None
    target.wait(lambda: target.pools[0].slot_view(0, 0)[0] != 0)
    os.kill(agent, signal.SIGSTOP)
    try:
        assert target.pools[0].slot_view(0, BIG_SLOTS - 1)[BIG - 1] == 0, "the read was over too soon"
        yield pull
    finally:
        os.kill(agent, signal.SIGCONT)


def path_of(target: Instance) -> str:
    return "same_host" if target.spec.same_host else "network"


def published_are_right(target: Instance, published: bytes) -> None:
    for n, good in enumerate(published):
        view = target.pools[0].slot_view(0, n)
        assert not good or bytes(view) == bytes([n + 1]) * BIG
        assert good or target.says_nothing(n)


def test_a_source_killed_during_the_read(big_pair: tuple[Instance, Instance]) -> None:
    source, target = big_pair
    with during_a_read(source, target) as pull:
        source.client.close()  # for good: a next agent could confirm what was read directly
    end = target.ended(pull, 15)
    # A copy of ours has ended when it says so; Mooncake's may go on.
    assert end.reason and any(end.unsafe) == (end.path == "network") and end.path == path_of(target)
    published_are_right(target, end.published)
    assert not any(p and u for p, u in zip(end.published, end.unsafe, strict=True))


def test_a_frozen_source_and_its_late_bytes(big_pair: tuple[Instance, Instance]) -> None:
    """Frozen in the middle of a read, and resumed after we gave up: what arrives then hits only slots marked unsafe,
    and once our agent has ended it hits nothing."""
    source, target = big_pair
    pid = source.client.pid
    assert pid is not None
    try:
        with during_a_read(source, target) as pull:
            os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        end = target.ended(pull, 30)
        assert end.reason and time.monotonic() - start < 20
        assert any(end.unsafe) == (end.path == "network") and end.path == path_of(target)
        published_are_right(target, end.published)
        # The scheduler's part: nothing is done with unsafe slots while the agent lives; others may be reused.
        for slot, unsafe in enumerate(end.unsafe):
            if not unsafe:
                target.pools[0].slot_view(0, slot)[:] = b"\xee" * BIG
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        for slot, unsafe in enumerate(end.unsafe):
            if not unsafe:
                assert bytes(target.pools[0].slot_view(0, slot)) == b"\xee" * BIG
        # The agent ends, and with it every late write; from then on the slots may be used.
        target.client.kill()
        target.wait(lambda: target.gone() == 1)
        for slot in range(BIG_SLOTS):
            target.pools[0].slot_view(0, slot)[:] = b"\xdd" * BIG
        time.sleep(0.5)
        assert all(bytes(target.pools[0].slot_view(0, s)) == b"\xdd" * BIG for s in range(BIG_SLOTS))
    finally:
        os.kill(pid, signal.SIGCONT)
    target.wait(lambda: target.client.ready)
    assert target.pull(source.address, range(4), range(4)).published == b"\1" * 4


def test_a_source_frozen_before_is_given_up_in_time(source: Instance, target: Instance) -> None:
    source.store(range(4), range(4))
    pid = source.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        refused_quickly(target, source.address, "no_answer:", 4.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    target.wait(lambda: target.pull(source.address, range(4), range(4)).published == b"\1" * 4)


def test_blocks_overwritten_during_the_read(big_pair: tuple[Instance, Instance]) -> None:
    source, target = big_pair
    with during_a_read(source, target) as pull:
        for slot in (0, 50, BIG_SLOTS - 1):  # read already, or being read, or not yet
            source.store([1000 + slot], [slot], lambda n, rank: b"\xcc" * BIG)
    end = target.ended(pull)
    assert end.path == path_of(target)
    assert [n for n, good in enumerate(end.published) if not good] == [0, 50, BIG_SLOTS - 1]
    assert end.reason.startswith("changed:") and not any(end.unsafe)
    published_are_right(target, end.published)


def test_our_agent_killed_during_the_read(big_pair: tuple[Instance, Instance]) -> None:
    source, target = big_pair
    with during_a_read(source, target):
        target.client.kill()
    target.wait(lambda: target.gone() == 1)
    assert all(target.says_nothing(n) for n in range(BIG_SLOTS))
    target.wait(lambda: target.client.ready)
    end = target.pull(source.address, range(8), range(8))
    assert end.published == b"\1" * 8 and end.path == path_of(target)
    assert source.client.starts == 1


def test_a_deadline_that_passes_during_the_read(big_pair: tuple[Instance, Instance]) -> None:
    """Nobody waits for it, but the read goes on to its end and its blocks count."""
    source, target = big_pair
    with during_a_read(source, target, timeout_s=0.5) as pull:
        time.sleep(0.5)
    end = target.ended(pull)
    assert all(end.published) and not any(end.unsafe) and end.path == path_of(target)


def test_the_agent_ends_with_its_engine() -> None:
    with Instance() as instance:
        assert instance.client._now is not None
        process = instance.client._now.process
        instance.client._now.link.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 5
        while process.poll() is None:
            assert time.monotonic() < deadline, "the agent outlived its engine"
            time.sleep(0.01)


def test_an_agent_that_cannot_start_says_why() -> None:
    with Instance() as first:
        second = Instance(listen_port=first.client.port)
        second.wait(lambda: second.client.failure)
        assert "choose a free port" in second.client.failure
        second.client.close()


def test_content_differs_from_key_to_key() -> None:
    assert content(1) != content(2)
