# SPDX-License-Identifier: Apache-2.0
"""Worker side: registers the KV tensors with the native engine, hands jobs over once a step, reports their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_pega_connector import compat
from vllm_pega_connector.config import PegaConfig
from vllm_pega_connector.decisions import DecisionLog, size, startup_block
from vllm_pega_connector.faults import NO_FAULTS, Faults
from vllm_pega_connector.guard import log_limited, logger, take_faults
from vllm_pega_connector.layout import group_runs, layout_identity
from vllm_pega_connector.messages import PegaHandshake, PegaMetadata, PegaWorkerMetadata, Rank, TransferJob
from vllm_pega_connector.metrics import PegaStats
from vllm_pega_connector.migration.share import PoolShare
from vllm_pega_connector.pool_size import pool_bytes


class PegaWorker:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: PegaConfig, faults: Faults = NO_FAULTS) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._faults = faults
        self._rank: Rank = (0, 0)
        self._engine: Any = None
        self._pool: Any = None
        self._kv_caches: dict[str, Any] = {}  # keeps the memory that the engine knows by address
        self._stream: Callable[[], int] = lambda: 0
        self._handshake: PegaHandshake | None = None
        self._untold: dict[Rank, PegaHandshake] = {}
        # Loads by job: whose they are and which blocks they write, until they are reported.
        self._loads: dict[int, tuple[str, np.ndarray]] = {}
        self._ended: list[tuple[Rank, int, str]] = []
        self._received: set[str] = set()
        # A block that is missing from a window cannot be recomputed alone: such loads fail as a whole.
        self._whole_requests = compat.loads_fail_whole(kv_cache_config)
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._stats = PegaStats.empty()
        self._decisions = DecisionLog(config.log_decisions)

    # --- start ---

    @property
    def wants_block_layout(self) -> bool:
        return self._config.kv_layout == "block" and self._vllm_config.device_config.device_type != "cpu"

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Builds pool, device and engine over vLLM's tensors. Raises with what to change: start-up must fail loudly."""
        from vllm_pega_connector import _native
        from vllm_pega_connector.devices import open_device
        from vllm_pega_connector.profile import load_profile

        if self._engine is not None:
            # vLLM keeps one connector per process. Moving on to the new tensors would hand one engine the other's KV.
            if _addresses(kv_caches) == _addresses(self._kv_caches):
                return
            raise RuntimeError(
                "PegaConnector: this process already has an engine with registered KV, and vLLM keeps one connector "
                "per process; shut that engine down first, or run each in a process of its own "
                "(VLLM_ENABLE_V1_MULTIPROCESSING=1, the default)"
            )
        self._rank = compat.worker_rank()
        self._kv_caches = kv_caches
        blocks = self._kv_cache_config.num_blocks
        layouts, all_runs = [], set()
        for group in self._kv_cache_config.kv_cache_groups:
            runs = group_runs((kv_caches[name] for name in group.layer_names if name in kv_caches), blocks)
            if not runs:
                raise ValueError(f"PegaConnector: vLLM registered no KV tensor for the layers {group.layer_names}")
            all_runs.update(runs)
            segments = [_native.Segment(r.base, r.stride, r.nbytes, r.allocation) for r in runs]
            layouts.append(_native.GroupLayout(segments, blocks))
        classes = sorted({layout.slot_bytes for layout in layouts})
        group_classes = tuple(classes.index(layout.slot_bytes) for layout in layouts)
        gpu_bytes = sum(run.nbytes for run in all_runs) * blocks  # cache groups may overlay the same memory
        budget = pool_bytes(self._config.host_pool_gib, gpu_bytes, self._vllm_config.parallel_config)
        slots = _slots_per_class(budget, classes, group_classes)
        device = open_device(next(iter(kv_caches.values())).device)
        self._pool = _native.HostPool([(size, slots[c]) for c, size in enumerate(classes)])
        device.register_pool(self._pool)
        self._stream = device.current_stream
        profile = _native.DeviceProfile(load_profile(self._config.device_profile, device.gpu_name))
        native_device = self._faults.device(device.native, self._rank)
        engine = _native.TransferEngine(
            native_device,
            self._pool,
            layouts,
            group_classes,
            profile,
            self._config.objective,
            self._config.load_policy.to_native(),
            self._config.save_policy.to_native(),
        )
        self._engine = self._faults.engine(engine, native_device, self._rank)
        self._handshake = PegaHandshake(
            tuple(slots),
            tuple(classes),
            group_classes,
            PoolShare.of(self._pool.data_fd, self._pool.table_fd),
            layout_identity(kv_caches.items(), blocks),
        )
        self._untold = {self._rank: self._handshake}
        pool = f"{size(self._pool.nbytes)} of host memory: {sum(slots):,} blocks of {size(classes[-1])}"
        if self._rank == (0, 0):
            logger.info("%s", startup_block(device.name, pool, blocks, layouts[0].slot_bytes,
                                            layouts[0].segments_per_block, profile, self._config))  # fmt: skip
        else:
            logger.info("PegaConnector on %s, rank %s: pool %s", device.name, self._rank, pool)
        self._stats.data["info"] = {
            "device": device.name,
            "profile": profile.name,
            "objective": self._config.objective,
            "load_policy": self._config.load_policy.backend,
            "save_policy": self._config.save_policy.backend,
        }
        if sum(slots) < blocks:
            logger.warning(
                "PegaConnector: the host pool (%d blocks) is smaller than the GPU's KV cache (%d blocks), so it will "
                "mostly churn; raise host_pool_gib above %.3g",
                sum(slots), blocks, gpu_bytes / 2**30,
            )  # fmt: skip

    @property
    def handshake(self) -> PegaHandshake | None:
        return self._handshake

    # --- every step ---

    def hand_over(self, metadata: PegaMetadata) -> None:
        """Gives this step's jobs to the engine, behind everything that the compute stream has been told so far.

        Never raises: a job that could not be handed over is reported as failed, or its request would wait for ever.
        """
        if metadata.jobs:
            try:
                event = self._engine.record_event(self._stream())
            except Exception as error:
                for job in metadata.jobs:
                    self._refuse(job, f"failed: no event on the compute stream: {error}")
            else:
                for job in metadata.jobs:
                    self._submit(job, event)
                self._engine.release_event(event)
        for job_id in metadata.cancel:
            self._engine.cancel(job_id)

    def _submit(self, job: TransferJob, event: int) -> None:
        if job.request_id:
            self._loads[job.job_id] = (job.request_id, np.frombuffer(job.moves, np.uint32).reshape(-1, 3)[:, 1])
        try:
            taken = self._engine.submit(
                job.job_id,
                job.direction,
                job.moves,
                job.keys,
                event,
                job.policy.to_native() if job.policy is not None else None,
                timeout_s=self._config.transfer_timeout_s,
            )
        except Exception as error:
            self._refuse(job, f"failed: {error}")
        else:
            if not taken:
                self._refuse(job, "queue full: the transfer engine has too many jobs")

    def _refuse(self, job: TransferJob, error: str) -> None:
        log_limited("refuse", "PegaConnector: a %s was not started: %s", job.direction, error)
        if job.request_id:
            self._loads.setdefault(job.job_id, (job.request_id, np.frombuffer(job.moves, np.uint32)[1::3]))
        self._end(job.job_id, error)

    def _end(self, job_id: int, error: str) -> None:
        self._ended.append((self._rank, job_id, error))
        load = self._loads.pop(job_id, None)
        if load is not None:
            request_id, blocks = load
            self._received.add(request_id)
            if error and self._whole_requests:
                self._failed.add(request_id)
            elif error:
                self._bad_blocks.update(blocks.tolist())

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended on this rank, well or not, since the last call; and those that failed whole."""
        if self._engine is not None:
            for result in self._engine.poll():
                self._stats.add_transfer(result)
                self._decisions.note(result)
                self._end(result.job_id, "" if result.status == "done" else f"{result.status}: {result.error}")
        taken = self._received, self._failed
        self._received, self._failed = set(), set()
        return taken

    def take_bad_blocks(self) -> set[int]:
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def take_handshake(self) -> PegaHandshake | None:
        """For vLLM to hand over; where nobody takes it, the first step's report tells it."""
        self._untold = {}
        return self._handshake

    def take_ended(self) -> PegaWorkerMetadata | None:
        if not self._ended and not self._untold:
            return None
        ended, self._ended = self._ended, []
        handshakes, self._untold = self._untold, {}
        return PegaWorkerMetadata(ended, handshakes)

    def take_stats(self) -> PegaStats | None:
        self._stats.data["faults"] += take_faults()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, PegaStats.empty()
        return stats

    def shutdown(self) -> None:
        if self._engine is not None and not self._engine.close(timeout_s=self._config.transfer_timeout_s):
            logger.error("PegaConnector: transfers were still in flight at shutdown; their memory stays mapped")


def _addresses(kv_caches: dict[str, Any]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in kv_caches.items()}


def _slots_per_class(budget: int, classes: list[int], group_classes: Iterable[int]) -> list[int]:
    """Splits `budget` bytes so that every group gets the same number of slots."""
    groups = [0] * len(classes)
    for c in group_classes:
        groups[c] += 1
    row = sum(size * n for size, n in zip(classes, groups, strict=True))
    if budget < row:
        raise ValueError(
            f"PegaConnector: host_pool_gib={budget / 2**30:.6g} holds no block: one block takes {row / 2**30:.6g} GiB; "
            "raise host_pool_gib"
        )
    return [budget // row * n for n in groups]
