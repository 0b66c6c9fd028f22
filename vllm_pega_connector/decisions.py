# SPDX-License-Identifier: Apache-2.0
"""Decisions made visible: the block of lines at start-up, and each new kind of transfer once."""

from __future__ import annotations

from typing import Any

from vllm_pega_connector.config import PegaConfig, PolicyConfig
from vllm_pega_connector.guard import logger

SHOWN_BLOCKS = (1, 64, 1024)  # a block of decode, a short prompt, a long one
# A kind is a direction, a backend, and size and number of ranges to the power of two: some hundred at most.
MAX_KINDS = 300


def size(nbytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes:.0f} B"


def startup_block(
    device: str, pool: str, gpu_blocks: int, block_bytes: int, fragments: int, profile: Any, config: PegaConfig
) -> str:
    """What the connector has and what it will do, for the log. `profile`: a _native.DeviceProfile."""
    one_range = "one range" if fragments == 1 else f"{fragments} fragments of {size(block_bytes / fragments)}"
    lines = [
        f"PegaConnector on {device}",
        f"  pool     {pool}; vLLM's own cache has {gpu_blocks:,} blocks",
        f"  layout   {one_range} per block",
        f"  profile  {profile.name}, objective {config.objective}",
    ]
    for direction in ("load", "save"):
        policy = config.policy(direction)  # type: ignore[arg-type]
        lines.append(f"  {direction}     {_words(policy)}")
        for blocks in SHOWN_BLOCKS:
            reason = _reason(direction, blocks, block_bytes, fragments, profile, config.objective, policy)
            lines.append(f"    {blocks:>5,} block{'s' if blocks > 1 else ' '}  {reason}")
    return "\n".join(lines)


def _words(policy: PolicyConfig) -> str:
    """A policy as it was configured."""
    limits = policy.model_dump(exclude_none=True, exclude={"backend"})
    return ", ".join([policy.backend, *(f"{key} {value}" for key, value in limits.items())])


def _reason(
    direction: str, blocks: int, block_bytes: int, fragments: int, profile: Any, objective: str, policy: PolicyConfig
) -> str:
    from vllm_pega_connector import _native

    ranges, fragment = blocks * fragments, block_bytes // fragments
    shape = _native.TransferShape(direction, ranges, blocks * block_bytes, fragment, fragment)
    return _native.decide(shape, profile, objective, policy.to_native()).reason


class DecisionLog:
    """With `log_decisions`, each new kind of transfer is logged once, with the reason for its backend."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._seen: set[tuple[str, str, int, int]] = set()

    def note(self, result: Any) -> None:
        """`result`: a _native.JobResult."""
        if not self._on or not result.backend or not result.ranges:
            return
        kind = (result.direction, result.backend, (result.bytes // result.ranges).bit_length(),
                result.ranges.bit_length())  # fmt: skip
        if kind in self._seen or len(self._seen) >= MAX_KINDS:
            return
        self._seen.add(kind)
        logger.info("PegaConnector decision: %s of %s", result.direction, result.reason)
