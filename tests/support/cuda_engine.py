# SPDX-License-Identifier: Apache-2.0
"""A transfer engine on a CUDA device, real or fake: whole saves and loads of blocks, and what must be true after."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_pega_connector import _native

PROFILE = _native.DeviceProfile({"name": "test"})


class Blocks:
    """`segments` x `count` x `size` bytes of device memory, layer after layer, beside a pool of as many slots.

    `read` and `write` copy the whole device memory to and from NumPy.
    """

    def __init__(self, device: Any, base: int, read: Any, write: Any, segments: int, count: int, size: int):
        self.device, self.base, self.read, self.write = device, base, read, write
        self.shape = (segments, count, size)
        self.slot_bytes = segments * size
        self.pool: Any = _native.HostPool([(self.slot_bytes, count)])
        device.register_host(self.pool.address, self.pool.nbytes)
        layout = _native.GroupLayout(
            [_native.Segment(base + i * count * size, size, size, i) for i in range(segments)], count
        )
        self.engine: Any = _native.TransferEngine(device, self.pool, [layout], [0], PROFILE, threaded=False)
        self._job = 0

    @staticmethod
    def bytes_for(segments: int, count: int, size: int) -> int:
        return segments * count * size

    def block(self, memory: np.ndarray, block: int) -> np.ndarray:
        return memory.reshape(self.shape)[:, block].ravel()

    def slot(self, slot: int) -> np.ndarray:
        return np.frombuffer(self.pool.slot_view(0, slot), np.uint8)

    def run(self, direction: str, moves: list[tuple[int, int]], policy: Any, event: int = 0) -> Any:
        """One job of (block, slot) moves, stepped to its end; it must end exactly once."""
        self._job += 1
        rows = np.array([(0, block, slot) for block, slot in moves], np.uint32)
        keys = b"".join(slot.to_bytes(8, "little") for _, slot in moves)
        assert self.engine.submit(self._job, direction, rows, keys, event=event, policy=policy, timeout_s=3600.0)
        ended: list[Any] = []
        for _ in range(1_000_000):
            self.engine.step()
            ended += self.engine.poll()
            if ended:
                break
        assert [r.job_id for r in ended] == [self._job] and self.engine.pending == 0
        return ended[0]

    def close(self) -> bool:
        done = self.engine.close(10.0)
        self.engine = None
        return done
