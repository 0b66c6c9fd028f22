# SPDX-License-Identifier: Apache-2.0
"""Pulls between two migration agents on this machine, against a bare Mooncake read of the same slots. No vLLM.

Every round does both, one after the other, so that the ratio of a pair sees the same machine. Says how much of a pull
is control plane (everything but the read), and the longest gap before a read began. With --busy, as many processes
as given spin meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.migration.support import Instance, keys, u32
from vllm_pega_connector.address import HostPort
from vllm_pega_connector.migration.data import DataPlane, runs


def spin() -> None:
    while True:
        pass


def percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    slot_bytes, count = args.slot_kib << 10, (args.mib << 10) // args.slot_kib
    order = np.random.default_rng(0).permutation(count) if args.shuffled else np.arange(count)
    with Instance(slots=count, slot_bytes=slot_bytes) as source, Instance(slots=count, slot_bytes=slot_bytes) as target:
        slots = u32(order)
        source.tables[0].begin(slots)
        for slot in range(count):
            source.pools[0].slot_view(0, slot)[:] = bytes([slot % 251]) * slot_bytes
        source.tables[0].end(slots, keys(range(count)), slot_bytes)
        # The bare read: an engine of this process, over the target's pool, from the source agent's engine.
        plane = DataPlane("127.0.0.1", "tcp", 30.0, [(target.pools[0].address, target.pools[0].nbytes)])
        found = ask_found(source, count)
        descriptors, _ = runs(
            found.bases[0],
            target.pools[0].slot_address(0, 0),
            order.astype(np.int64),
            order.astype(np.int64),
            slot_bytes,
        )
        segment = str(HostPort("127.0.0.1", found.data_port))
        spinners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(args.busy)]
        for spinner in spinners:
            spinner.start()
        rounds = []
        try:
            for n in range(args.rounds + 1):
                rounds.append(one_round(target, source.address, count, slots, plane, segment, descriptors))
                if n == 0:
                    rounds.clear()  # connections are made, pages touched
        finally:
            for spinner in spinners:
                spinner.kill()
        for slot in range(0, count, max(1, count // 16)):
            assert bytes(target.pools[0].slot_view(0, slot)) == bytes([slot % 251]) * slot_bytes, "wrong bytes"
    shares = [r["control_s"] / r["pull_s"] for r in rounds]
    return {
        "mib": args.mib, "slot_kib": args.slot_kib, "shuffled": args.shuffled, "busy": args.busy,
        "cores": os.cpu_count(), "rounds": len(rounds),
        "pull_gb_s": args.mib * 2**20 / 1e9 / statistics.median(r["pull_s"] for r in rounds),
        "bare_gb_s": args.mib * 2**20 / 1e9 / statistics.median(r["bare_s"] for r in rounds),
        "pull_to_bare_time": statistics.median(r["pull_s"] / r["bare_s"] for r in rounds),
        "read_to_bare_time": statistics.median(r["read_s"] / r["bare_s"] for r in rounds),
        "control_share_median": statistics.median(shares), "control_share_p99": percentile(shares, 99),
        "gap_ms_median": 1e3 * statistics.median(r["gap_s"] for r in rounds),
        "gap_ms_max": 1e3 * max(r["gap_s"] for r in rounds),
    }  # fmt: skip


def ask_found(source: Instance, count: int) -> Any:
    """One lookup by hand: where the source's pool and data port are."""
    import zmq

    from vllm_pega_connector.migration import protocol

    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger, dealer.rcvtimeo = 0, 5000
    dealer.connect(f"tcp://{source.address}")
    dealer.send_multipart(protocol.frames(protocol.Lookup(1, source.spec.fingerprint, keys(range(count)), 0.0)))
    found = protocol.parse(dealer.recv_multipart(), protocol.reply_decoder)
    dealer.close()
    assert isinstance(found, protocol.Found), found
    return found


def one_round(
    target: Instance, address: str, count: int, slots: bytes, plane: DataPlane, segment: str, descriptors: list[Any]
) -> dict[str, float]:
    start = time.perf_counter()
    landed, _ = plane.read(segment, descriptors)
    bare = time.perf_counter() - start
    assert landed == len(descriptors)
    start = time.perf_counter()
    pull = target.post(address, range(count), np.frombuffer(slots, np.uint32), timeout_s=60)
    while not any(e.id == pull for e in target.events):
        target.events += target.client.poll()
        time.sleep(0.0002)
    wall = time.perf_counter() - start
    end = target.ended(pull)
    assert all(end.published), end.reason
    target.events.clear()
    read = end.seconds["read"]
    return {
        "bare_s": bare,
        "pull_s": wall,
        "read_s": read,
        "control_s": wall - read,
        "gap_s": wall - read - end.seconds["validate"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--slot-kib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shuffled", action="store_true", help="no two blocks are neighbours")
    parser.add_argument("--busy", type=int, default=0, help="processes that spin meanwhile")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    result = measure(args)
    for name, value in result.items():
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
