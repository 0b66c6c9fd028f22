# SPDX-License-Identifier: Apache-2.0
"""The native device behind vLLM's KV tensors: CUDA where they lie on a GPU, else the host device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A copy saturates a memory channel with few threads, and every one of them is taken from the CPU model itself.
HOST_WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class OpenDevice:
    """native: a _native.Device. gpu_name: "" on a host. current_stream: the compute stream's native handle."""

    native: Any
    name: str
    gpu_name: str
    current_stream: Callable[[], int]
    register_pool: Callable[[Any], None]


def open_device(torch_device: Any) -> OpenDevice:
    """Opens the device of a torch tensor. Raises RuntimeError with what is missing."""
    from vllm_pega_connector import _native

    if torch_device.type == "cpu":
        native = _native.HostDevice(HOST_WORKERS)
        return OpenDevice(native, f"host device, workers: {HOST_WORKERS}", "", lambda: 0, lambda pool: None)
    if torch_device.type != "cuda":
        raise RuntimeError(f"PegaConnector: KV on a {torch_device.type} device is not supported; cuda and cpu are")
    return _open_cuda(torch_device)


def _open_cuda(torch_device: Any) -> OpenDevice:
    import torch

    from vllm_pega_connector import _native, kernels

    ordinal = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
    cuda: Any = _native.CudaDevice(ordinal, kernels.compile_cubin(ordinal))
    name = torch.cuda.get_device_name(ordinal)
    return OpenDevice(
        cuda,
        name,
        name,
        lambda: torch.cuda.current_stream(ordinal).cuda_stream,
        lambda pool: cuda.register_host(pool.address, pool.nbytes),
    )
