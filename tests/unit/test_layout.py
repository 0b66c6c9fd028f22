# SPDX-License-Identifier: Apache-2.0
"""Runs of KV tensors in every layout that vLLM 0.26 to 0.33 makes, against an enumeration of every byte.

B blocks, L layers, H heads, N tokens per block, C bytes of one head of one token (K and V); logical shape [B, H, N, C].
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from vllm_pega_connector.layout import Run, block_runs, group_runs

B, L, H, N, C = 6, 3, 2, 4, 8
PAGE = H * N * C


def views_of_one_allocation(order: str, dtype: torch.dtype = torch.int8) -> list[torch.Tensor]:
    """vLLM 0.29 and later: strided [B, H, N, C] views of one int8 allocation whose memory order is `order`."""
    sizes = {"B": B, "L": L, "H": H, "N": N, "C": C}
    strides, step = {}, 1
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
    item = dtype.itemsize
    buffer = torch.zeros(step * item, dtype=torch.int8).view(dtype)
    shape, stride = (B, H, N, C), tuple(strides[d] for d in "BHNC")
    return [torch.as_strided(buffer, shape, stride, layer * strides["L"]) for layer in range(L)]


def bytes_of_block(tensor: torch.Tensor, block_dim: int, blocks: int, block: int) -> set[int]:
    """Every address of one manager block, element by element."""
    ratio = tensor.shape[block_dim] // blocks
    ranges = [
        range(block * ratio, (block + 1) * ratio) if d == block_dim else range(n) for d, n in enumerate(tensor.shape)
    ]
    item = tensor.element_size()
    found: set[int] = set()
    for index in itertools.product(*ranges):
        at = tensor.data_ptr() + item * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        found.update(range(at, at + item))
    return found


def bytes_of_runs(runs: list[Run], block: int) -> list[int]:
    return [run.base + block * run.stride + i for run in runs for i in range(run.nbytes)]


def check(runs: list[Run], tensors: list[torch.Tensor], block_dim: int = 0, blocks: int = B) -> None:
    """The runs hold every byte of every block, each once, and none else."""
    for block in range(blocks):
        addresses = bytes_of_runs(runs, block)
        expected = set().union(*(bytes_of_block(t, block_dim, blocks, block) for t in tensors))
        assert len(addresses) == len(expected)
        assert set(addresses) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("order", "runs_per_block"),
    [("LBNHC", L), ("LBHNC", L), ("LHBNC", L * H), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)],
)
def test_one_allocation(order: str, runs_per_block: int, dtype: torch.dtype) -> None:
    tensors = views_of_one_allocation(order, dtype)
    runs = group_runs(tensors, B)
    assert len(runs) == runs_per_block
    assert len({run.allocation for run in runs}) == 1
    assert sum(run.nbytes for run in runs) == L * PAGE * dtype.itemsize
    check(runs, tensors)


@pytest.mark.parametrize(
    ("shape", "block_dim", "runs_per_block"),
    [
        ((B, 2, N, H, C), 0, 1),  # Triton, FlashInfer; FlashAttention 0.23 to 0.25
        ((2, B, N, H, C), 1, 2),  # FlashAttention up to 0.22: K and V far apart
        ((B, N, 36), 0, 1),  # MLA
        ((B, L, 2, N, H, C), 0, 1),  # all layers in one tensor (up to 0.28)
    ],
)
def test_older_tensors(shape: tuple[int, ...], block_dim: int, runs_per_block: int) -> None:
    tensor = torch.zeros(shape, dtype=torch.float16)
    runs = block_runs(tensor, B)
    assert len(runs) == runs_per_block
    check(runs, [tensor], block_dim)


def test_a_layer_each_keeps_the_order_of_the_layers() -> None:
    """Slots of two processes agree only if nothing depends on where the allocator put a tensor."""
    tensors = [torch.zeros((B, N, 36), dtype=torch.float16) for _ in range(4)]
    random.Random(0).shuffle(tensors)
    runs = group_runs(tensors, B)
    assert [run.allocation for run in runs] == [t.untyped_storage().data_ptr() for t in tensors]
    check(runs, tensors)


@pytest.mark.parametrize(("order", "runs_per_block"), [("LBNHC", L), ("LBHNC", L), ("LHBNC", L * H)])
def test_kernel_blocks_smaller_than_manager_blocks(order: str, runs_per_block: int) -> None:
    """Views of kernel blocks: two of them make one manager block."""
    tensors = views_of_one_allocation(order)
    runs = group_runs(tensors, B // 2)
    assert len(runs) == runs_per_block
    check(runs, tensors, blocks=B // 2)


def test_kernel_blocks_of_split_k_and_v() -> None:
    tensor = torch.zeros((2, B, N, H, C), dtype=torch.float16)
    runs = block_runs(tensor, B // 2)
    assert len(runs) == 2
    check(runs, [tensor], block_dim=1, blocks=B // 2)


def test_block_outermost_is_one_run_whatever_the_order_of_the_layers() -> None:
    tensors = views_of_one_allocation("BLNHC")
    assert group_runs(reversed(tensors), B) == group_runs(tensors, B)


def test_padding_between_pages_is_not_moved() -> None:
    buffer = torch.zeros(B * 100, dtype=torch.int8)
    tensor = torch.as_strided(buffer, (B, H, N, C), (100, N * C, C, 1), 5)
    runs = block_runs(tensor, B)
    assert [(r.base - buffer.data_ptr(), r.stride, r.nbytes) for r in runs] == [(5, 100, PAGE)]
    check(runs, [tensor])


def test_padding_within_a_page_splits_it() -> None:
    buffer = torch.zeros(B * 200, dtype=torch.int8)
    tensor = torch.as_strided(buffer, (B, H, N, C), (200, 100, C, 1))
    assert len(block_runs(tensor, B)) == H
    check(block_runs(tensor, B), [tensor])


def test_layers_that_share_memory_count_once() -> None:
    tensors = views_of_one_allocation("LBNHC")
    shared = [tensors[0], tensors[1], tensors[0], tensors[1].view(tensors[1].shape)]
    runs = group_runs(shared, B)
    assert runs == group_runs(tensors[:2], B)
    check(runs, tensors[:2])


def test_adjacent_allocations_are_not_joined() -> None:
    """Two runs may lie side by side in memory and still belong to different allocations."""
    buffer = torch.zeros(2 * B * PAGE, dtype=torch.int8)

    class Part:
        """A tensor whose storage is its own, at an address that we choose."""

        def __init__(self, offset: int, allocation: int) -> None:
            self._view = torch.as_strided(buffer, (B, H, N, C), (2 * PAGE, N * C, C, 1), offset)
            self._allocation = allocation
            self.shape, self.stride, self.element_size = self._view.shape, self._view.stride, self._view.element_size
            self.data_ptr = self._view.data_ptr

        def untyped_storage(self) -> Part.Storage:
            return Part.Storage(self._allocation)

        class Storage:
            def __init__(self, address: int) -> None:
                self.data_ptr = lambda: address

    assert len(group_runs([Part(0, 1), Part(PAGE, 1)], B)) == 1
    assert len(group_runs([Part(0, 1), Part(PAGE, 2)], B)) == 2


def test_runs_are_never_joined_across_blocks() -> None:
    """In LBNHC block 1 follows block 0 at once; that is for the planner to merge, not part of the layout."""
    (run,) = block_runs(views_of_one_allocation("LBNHC")[0], B)
    assert (run.stride, run.nbytes) == (PAGE, PAGE)


@pytest.mark.parametrize("shape", [(5, N, H, C), (2, 5, N, H, C), (B + 1, H, N, C), (0, H, N, C)])
def test_a_tensor_without_these_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no dimension of 6 blocks"):
        block_runs(torch.zeros(shape, dtype=torch.int8), B)


def test_repeated_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="repeats memory"):
        block_runs(torch.zeros((B, 1, N, C), dtype=torch.int8).expand(B, H, N, C), B)


@pytest.mark.parametrize("seed", range(50))
def test_random_strides(seed: int) -> None:
    """Any order of dimensions, any padding, any offset: the runs are the bytes."""
    rng = random.Random(seed)
    shape = [rng.choice((2, 3, 6)), *(rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3)))]
    strides, step = [0] * len(shape), 1
    for d in rng.sample(range(len(shape)), len(shape)):
        strides[d] = step
        step *= shape[d]
        step += rng.choice((0, 0, 1, 5))
    offset = rng.randint(0, 7)
    tensor = torch.as_strided(torch.zeros(offset + step, dtype=torch.int16), shape, strides, offset)
    check(group_runs([tensor], shape[0]), [tensor], blocks=shape[0])
