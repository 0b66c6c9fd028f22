# SPDX-License-Identifier: Apache-2.0
"""GPU blocks for requests that load: under older vLLM they may wait for each other for ever; not with this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pega_connector import compat
from vllm_pega_connector.scheduler_state import Shared

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Room:
    """A request that loads, or has loaded, holds its blocks and cannot be preempted until it starts.

    Two faults of vLLM before 0.30 come of that. When its scheduler finds no room for a request it looks at none behind
    it, so one may stand before the very blocks that it needs (`compat.overlooks_loaded`); and it may let in two loads
    that leave each other without room for drafts (`compat.unreserved_tokens`). The answer "not yet" mends both: vLLM
    then goes on to the next request. Under newer versions nobody is told to wait.
    """

    def __init__(self, shared: Shared, vllm_config: Any) -> None:
        self._shared = shared
        self._overlooked = compat.overlooks_loaded()
        self._unreserved = compat.unreserved_tokens(vllm_config)
        self._arrived: set[str] = set()  # hold what they loaded, with our connector or another
        self._to_come: dict[str, int] = {}  # blocks that those whose load is ours take when they start

    def loads(self, request: Request, held: int) -> None:
        """A load of ours into `held` blocks begins."""
        if self._unreserved:
            self._to_come[request.request_id] = self._blocks_to_start(request) - held

    def arrived(self, request_id: str) -> None:
        """A load has ended, so its request may start."""
        if self._overlooked:
            self._arrived.add(request_id)

    def settled(self, request_id: str) -> None:
        """The request has the blocks that it starts with, or is over: it waits for none."""
        self._arrived.discard(request_id)
        self._to_come.pop(request_id, None)

    def gives_way(self, request_id: str) -> bool:
        """Whether vLLM must look at others before this request, which asks for what it may load."""
        self.settled(request_id)  # it asks, so it holds nothing: its load failed
        return bool(self._arrived)

    def too_tight(self, request: Request) -> bool:
        """Whether another load might leave those that load without the blocks that they start with."""
        if not self._to_come:
            return False
        room: int = self._shared.pool.get_num_free_blocks()
        return sum(self._to_come.values()) + self._blocks_to_start(request) > room

    def _blocks_to_start(self, request: Request) -> int:
        tokens = request.num_tokens + self._unreserved
        return -(-tokens // self._shared.block_size) * len(self._shared.groups)
