# SPDX-License-Identifier: Apache-2.0
"""PegaConnector: vLLM's KV connector interface, answered by `scheduler.py` or `worker.py`, whichever side this is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_pega_connector import compat, plugin
from vllm_pega_connector.config import PegaConfig
from vllm_pega_connector.faults import Faults
from vllm_pega_connector.guard import guarded, logger
from vllm_pega_connector.messages import PegaHandshake, PegaMetadata, PegaWorkerMetadata
from vllm_pega_connector.metrics import PegaStats
from vllm_pega_connector.prometheus import PegaPromMetrics
from vllm_pega_connector.scheduler import PegaScheduler
from vllm_pega_connector.worker import PegaWorker

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PegaConnector(KVConnectorBase_V1, SupportsHMA):
    _cache_hit_source = compat.host_memory()  # for vllm:prompt_tokens_cached_by_source_total

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = PegaConfig.from_extra_config(transfer.kv_connector_extra_config)
        faults = Faults.from_environment()
        self._scheduler: PegaScheduler | None = None
        self._worker: PegaWorker | None = None
        support = compat.check_support(vllm_config, kv_cache_config)
        if not support:
            if role == KVConnectorRole.SCHEDULER:
                logger.warning("PegaConnector is off: %s. Serving goes on without it.", support.reason)
        elif role == KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    'PegaConnector: kv_load_failure_policy is "%s", so a failed load fails its request; set it to '
                    '"recompute" in --kv-transfer-config',
                    transfer.kv_load_failure_policy,
                )
            if not transfer.is_kv_producer and config.migration is None:
                logger.warning(
                    'PegaConnector: kv_role is "%s" and migration is not configured, so nothing will ever fill the '
                    'host pool; set kv_role to "kv_both", or configure migration',
                    transfer.kv_role,
                )
            loads = transfer.is_kv_consumer
            if loads and compat.loads_fail_whole(kv_cache_config) and not compat.can_fail_whole():
                logger.warning(
                    "PegaConnector saves but does not load: this vLLM cannot survive a failed load of a model with "
                    "sliding windows or several KV cache groups; vLLM 0.30 or newer can"
                )
                loads = False
            self._scheduler = faults.scheduler(
                PegaScheduler(vllm_config, kv_cache_config, config, saves=transfer.is_kv_producer, loads=loads)
            )
        else:
            self._worker = PegaWorker(vllm_config, kv_cache_config, config, faults)

    # --- worker side ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """vLLM 0.26 to 0.28, V1 model runner: one tensor in which a block of all layers is one range."""
        return self._worker is not None and self._worker.wants_block_layout

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        if self._worker is not None:
            names = [name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names]
            self._worker.register(dict.fromkeys(names, kv_cache))

    def get_handshake_metadata(self) -> PegaHandshake | None:
        # MultiConnector hands every child the first one's metadata, and NixlConnector ends the start when that is
        # not its own. There ours takes another way, with the first step.
        return self._worker.take_handshake() if self._worker is not None and compat.alone(self) else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._hand_over(connector_metadata)

    @guarded(lambda: None)
    def _hand_over(self, metadata: KVConnectorMetadata) -> None:
        # The one hand-over point: it comes every step, after block zeroing and before the forward.
        if self._worker is not None and isinstance(metadata, PegaMetadata):
            self._worker.hand_over(metadata)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received = self._worker.take_received()[0] if self._worker is not None else set()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM 0.30 and newer ask this instead of get_finished."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        received, failed = self._take_received()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    @guarded(lambda: (set(), set()))
    def _take_received(self) -> tuple[set[str], set[str]]:
        return self._worker.take_received() if self._worker is not None else (set(), set())

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> PegaWorkerMetadata | None:
        return self._worker.take_ended() if self._worker is not None else None

    # Saves and loads are asynchronous and per block, so vLLM's per-layer hooks have nothing to do.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    # --- scheduler side ---

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost save is only a later miss

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.set_workers(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        # Not guarded: if a load that vLLM now counts on could not be noted, its request would wait for ever.
        if self._scheduler is not None:
            self._scheduler.after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(PegaMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PegaMetadata:
        return self._scheduler.build_metadata(scheduler_output) if self._scheduler is not None else PegaMetadata()

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        self._scheduler.received(connector_output.finished_recving or ())
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, PegaWorkerMetadata):
            self._scheduler.update(metadata)

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids) if self._scheduler is not None else None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy()

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.make_room()

    @guarded(list)
    def take_events(self) -> list[KVCacheEvent]:
        return self._scheduler.take_events() if self._scheduler is not None else []

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else True

    # --- both ---

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> PegaStats | None:
        if self._worker is not None:
            return self._worker.take_stats()
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        config = PegaConfig.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        Faults.from_environment()  # vLLM asks this first, before any process starts
        return compat.required_layout(vllm_config, config.kv_layout)

    @classmethod
    @guarded(lambda: None)
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PegaStats | None:
        return PegaStats(data=data) if data else PegaStats.empty()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PegaPromMetrics:
        return PegaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(lambda: None)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.shutdown()
            self._scheduler = None


# Loaded by path alone, from a package that is not installed, the name would stay unknown; but MultiConnector looks it
# up to read our statistics, and would end the API server when it finds nothing.
plugin.register()
