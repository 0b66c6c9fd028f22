# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV tensors to the native engine's segments: addresses, strides and bytes, never an assumed shape.

Pages are opaque bytes. A tensor's blocks lie along one of its first two dimensions; everything else about it
(K and V split or packed, heads first or last, padding, kernel blocks smaller than manager blocks) is only more
or fewer contiguous runs per block.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Run:
    """One contiguous fragment of every block: `nbytes` at `base + block * stride`."""

    base: int
    stride: int
    nbytes: int
    allocation: int


def block_runs(tensor: Any, num_blocks: int) -> list[Run]:
    """The runs of one KV tensor (torch.Tensor or alike), in address order.

    Raises ValueError if no leading dimension counts `num_blocks` manager blocks, or kernel blocks of them.
    """
    shape, strides, item = list(tensor.shape), list(tensor.stride()), tensor.element_size()
    block_dim = next((d for d in (0, 1) if d < len(shape) and shape[d] and shape[d] % num_blocks == 0), None)
    if block_dim is None:
        raise ValueError(f"KV tensor of shape {tuple(shape)} has no dimension of {num_blocks} blocks")
    ratio = shape[block_dim] // num_blocks  # kernel blocks per manager block
    stride = strides[block_dim] * ratio
    inner = [(n, s) for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if d != block_dim and n > 1]
    if ratio > 1:
        inner.append((ratio, strides[block_dim]))
    if any(s <= 0 for _, s in inner):
        raise ValueError(f"KV tensor with strides {tuple(strides)} repeats memory")
    offsets, run = _contiguous_runs(inner)
    allocation = tensor.untyped_storage().data_ptr()
    base = tensor.data_ptr()
    return [Run(base + o * item, stride * item, run * item, allocation) for o in offsets]


def _contiguous_runs(dims: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """(element offsets of the runs, elements per run) of the index space `dims` of (size, stride)."""
    run = 1
    outer = []
    for size, stride in sorted(dims, key=lambda d: d[1]):
        if stride == run:
            run *= size
        else:
            outer.append((size, stride))
    offsets = [0]
    for size, stride in outer:
        offsets = [o + i * stride for o in offsets for i in range(size)]
    return sorted(offsets), run


def group_runs(tensors: Iterable[Any], num_blocks: int) -> list[Run]:
    """The runs of all layers of a cache group; layers that alias one memory count once.

    Allocations come in the order given, for where they lie differs between processes; within one, runs are in address
    order, and those that follow each other within the block stride are joined: a block-outermost layout becomes one
    run per block, whatever the order of its layers.
    """
    seen: set[tuple[int, tuple[int, ...]]] = set()
    runs: dict[int, list[Run]] = {}
    for tensor in tensors:
        identity = (tensor.data_ptr(), tuple(tensor.stride()))
        if identity not in seen:
            seen.add(identity)
            for run in block_runs(tensor, num_blocks):
                runs.setdefault(run.allocation, []).append(run)
    joined: list[Run] = []
    for run in (run for allocation in runs.values() for run in sorted(allocation)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.base + last.nbytes == run.base
            and (last.stride, last.allocation) == (run.stride, run.allocation)
            and last.nbytes + run.nbytes <= run.stride
        ):
            joined[-1] = Run(last.base, last.stride, last.nbytes + run.nbytes, last.allocation)
        else:
            joined.append(run)
    return joined


def layout_identity(tensors: Iterable[tuple[str, Any]], num_blocks: int) -> str:
    """A digest of what lies where in a block, whatever their number: equal on ranks whose slots mean the same."""
    described = []
    for name, tensor in tensors:
        shape, strides = list(tensor.shape), list(tensor.stride())
        block_dim = next((d for d in (0, 1) if d < len(shape) and shape[d] and shape[d] % num_blocks == 0), 0)
        # Strides may grow with the number of blocks; the order of the dimensions does not.
        order = sorted((d for d in range(len(shape))), key=lambda d: strides[d], reverse=True)
        inner = [n for d, n in enumerate(shape) if d != block_dim]
        described.append((name, str(tensor.dtype), inner, shape[block_dim] // num_blocks, order))
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]
