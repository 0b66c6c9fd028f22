# SPDX-License-Identifier: Apache-2.0
"""The worker side by itself: what it does when vLLM registers KV tensors more than once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from vllm_pega_connector import compat
from vllm_pega_connector.config import PegaConfig
from vllm_pega_connector.worker import PegaWorker

BLOCKS = 4


def kv() -> dict[str, torch.Tensor]:
    return {"layer.0": torch.zeros(BLOCKS, 2, 32, 8)}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> PegaWorker:
    monkeypatch.setattr(compat, "worker_rank", lambda: (0, 0))
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, nnodes=1)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=4, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer.0"], spec)]
    return PegaWorker(
        SimpleNamespace(parallel_config=parallel),
        SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups),
        PegaConfig.from_extra_config({"host_pool_gib": 0.001}, env={}),
    )


def test_registered_again_the_same_tensors_change_nothing(worker: PegaWorker) -> None:
    caches = kv()
    worker.register(caches)
    engine, handshake = worker._engine, worker.handshake
    worker.register(dict(caches))
    assert worker._engine is engine and worker.handshake == handshake is not None
    worker.shutdown()


def test_a_second_engine_in_one_process_is_refused(worker: PegaWorker) -> None:
    """Else the first engine's requests would be given the second one's KV."""
    first = kv()
    worker.register(first)
    engine = worker._engine
    with pytest.raises(RuntimeError, match="one connector per process; shut that engine down first"):
        worker.register(kv())
    assert worker._engine is engine and worker._kv_caches is first
    worker.shutdown()


def test_the_pool_is_told_once_by_either_way(worker: PegaWorker) -> None:
    """By vLLM's handshake, or, where MultiConnector keeps that for another connector, with the first step's report."""
    worker.register(kv())
    told = worker.take_ended()
    assert told is not None and told.handshakes == {(0, 0): worker.handshake} and not told.ended
    assert worker.take_ended() is None
    worker._untold = told.handshakes
    assert worker.take_handshake() == worker.handshake is not None
    assert worker.take_ended() is None
    worker.shutdown()


def test_under_a_multi_connector_the_handshake_is_another_s(
    worker: PegaWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state

    from vllm_pega_connector import PegaConnector

    worker.register(kv())
    connector = PegaConnector.__new__(PegaConnector)
    connector._worker = worker
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    assert connector.get_handshake_metadata() is None
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    assert connector.get_handshake_metadata() == worker.handshake is not None
    worker.shutdown()
