# SPDX-License-Identifier: Apache-2.0
"""Pulls between two migration agents on this machine, against a bare Mooncake read of the same slots. No vLLM.

Every round does both, in turns first and second, so that the ratio of a pair sees the same machine. "Bare" is
Mooncake's `batch_transfer_sync_read` of all descriptors in one call, between two processes, into the same memory.
With --same-host the agents do without Mooncake; the bare read stays what it is. Said of a pull:

* its wall time, from before it is posted until the engine's side has seen its end;
* control plane: all of that but the read, which is from the first descriptors handed to Mooncake until the last have
  landed;
* gaps: from the post to the first descriptors handed to Mooncake, and the longest time between two batches handed to it
  while more are left.

With --busy, as many processes as given spin meanwhile; "cores" makes one for every core.
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
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.data import DataPlane, Descriptors

PHASES = ("post", "lookup", "queue", "read", "validate")
MAX_DESCRIPTORS = 1024  # that Mooncake takes in one call


def spin() -> None:
    while True:
        pass


class BareReader(DataPlane):
    """Mooncake alone, with its library and environment as the agents set them up."""

    def read_all(self, peer: str, descriptors: Descriptors) -> None:
        columns = (descriptors.local, descriptors.remote, descriptors.nbytes)
        for first in range(0, len(descriptors), MAX_DESCRIPTORS):
            local, remote, sizes = (column[first : first + MAX_DESCRIPTORS].tolist() for column in columns)
            assert self._engine.batch_transfer_sync_read(peer, local, remote, sizes) == 0, "the bare read failed"


def measure(mib: int, slot_kib: int, rounds: int, shuffled: bool, busy: int, same_host: bool) -> dict[str, Any]:
    slot_bytes, count = slot_kib << 10, (mib << 10) // slot_kib
    order = np.random.default_rng(0).permutation(count) if shuffled else np.arange(count)
    shape: dict[str, Any] = {"slots": count, "slot_bytes": slot_bytes, "same_host": same_host}
    with Instance(**shape) as source, Instance(**shape) as target:
        slots = u32(order)
        source.tables[0].begin(slots)
        for slot in range(count):
            source.pools[0].slot_view(0, slot)[:] = bytes([slot % 251]) * slot_bytes
        source.tables[0].end(slots, keys(range(count)), slot_bytes)
        bare = BareReader("127.0.0.1", "tcp", 30.0, [(target.pools[0].address, target.pools[0].nbytes)])
        found = ask_found(source, count)
        descriptors = Descriptors.runs(found.bases[0], target.pools[0].slot_address(0, 0), order, order, slot_bytes)
        segment = str(HostPort("127.0.0.1", found.data_port))
        spinners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
        for spinner in spinners:
            spinner.start()
        pairs: list[dict[str, Any]] = []
        try:
            for n in range(-1, rounds):  # the first makes connections and touches pages
                pair: dict[str, Any] = {}
                for what in ("bare", "pull")[:: 1 if n % 2 else -1]:
                    if what == "bare":
                        start = time.perf_counter()
                        bare.read_all(segment, descriptors)
                        pair["bare_s"] = time.perf_counter() - start
                    else:
                        pair |= one_pull(target, source.address, count, slots)
                if n >= 0:
                    pairs.append(pair)
        finally:
            for spinner in spinners:
                spinner.kill()
        for slot in range(0, count, max(1, count // 16)):
            assert bytes(target.pools[0].slot_view(0, slot)) == bytes([slot % 251]) * slot_bytes, "wrong bytes"
    return {
        "path": "same_host" if same_host else "network",
        "mib": mib, "slot_kib": slot_kib, "shuffled": shuffled, "busy": busy, "cores": os.cpu_count(),
        "descriptors": len(descriptors), **summary(pairs, count * slot_bytes), "pairs": pairs,
    }  # fmt: skip


def summary(pairs: list[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    def median(name: str, over: str = "") -> float:
        return statistics.median(p[name] / (p[over] if over else 1.0) for p in pairs)

    def ms(name: str) -> dict[str, float]:
        values = [1e3 * p[name] for p in pairs]
        return {"p50": float(np.median(values)), "p99": float(np.percentile(values, 99)), "max": max(values)}

    return {
        "rounds": len(pairs),
        "pull_gb_s": nbytes / 1e9 / median("pull_s"),
        "bare_gb_s": nbytes / 1e9 / median("bare_s"),
        "pull_to_bare_time": median("pull_s", "bare_s"),
        "read_to_bare_time": median("read_s", "bare_s"),
        "control_share": median("control_s", "pull_s"),
        "control_share_p99": float(np.percentile([p["control_s"] / p["pull_s"] for p in pairs], 99)),
        "post_to_first_ms": ms("first_s"),
        "between_batches_ms": ms("gap_s"),
        "gaps_above_50_ms": sum(p["first_s"] > 0.05 or p["gap_s"] > 0.05 for p in pairs),
        "phase_ms": {phase: 1e3 * median(f"{phase}_s") for phase in PHASES},
    }


def ask_found(source: Instance, count: int) -> Any:
    """One lookup by hand: where the source's pool and data port are."""
    import zmq

    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger, dealer.rcvtimeo = 0, 5000
    dealer.connect(f"tcp://{source.address}")
    dealer.send_multipart(protocol.frames(protocol.Lookup(1, source.spec.fingerprint, keys(range(count)), 0.0)))
    found = protocol.parse(dealer.recv_multipart(), protocol.reply_decoder)
    dealer.close()
    assert isinstance(found, protocol.Found), found
    return found


def one_pull(target: Instance, address: str, count: int, slots: bytes) -> dict[str, float]:
    start = time.perf_counter()
    pull = target.post(address, range(count), np.frombuffer(slots, np.uint32), timeout_s=60)
    while not any(e.id == pull for e in target.events):
        target.events += target.client.poll()
        time.sleep(0.0002)
    wall = time.perf_counter() - start
    end = target.ended(pull)
    assert all(end.published), end.reason
    assert end.path == ("same_host" if target.spec.same_host else "network")
    target.events.clear()
    phases = {f"{phase}_s": end.seconds[phase] for phase in PHASES}
    first = sum(end.seconds[phase] for phase in ("post", "lookup", "queue"))
    return {"pull_s": wall, "control_s": wall - end.seconds["read"], "first_s": first, "gap_s": end.gap_s, **phases}


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if name == "pairs":
            continue
        if isinstance(value, dict):
            value = "  ".join(f"{k} {v:.3g}" for k, v in value.items())
        print(f"{name:22} {value:.4g}" if isinstance(value, float) else f"{name:22} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--slot-kib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shuffled", action="store_true", help="no two blocks are neighbours")
    parser.add_argument("--busy", default="0", help="processes that spin meanwhile, or `cores`")
    parser.add_argument("--same-host", action="store_true", help="the agents read each other's pools directly")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    busy = os.cpu_count() or 1 if args.busy == "cores" else int(args.busy)
    result = measure(args.mib, args.slot_kib, args.rounds, args.shuffled, busy, args.same_host)
    show(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
