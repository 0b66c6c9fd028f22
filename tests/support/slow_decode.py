# SPDX-License-Identifier: Apache-2.0
"""A logits processor that gives each step at least STEP_S, for `--logits-processors`: a tiny model's stream would else
be over before a client on a busy machine has asked for anything to be done with it."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

STEP_S = 0.006


class SlowDecode(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False  # those that are do not run for greedy requests

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        time.sleep(STEP_S)
        return logits
