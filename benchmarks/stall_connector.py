# SPDX-License-Identifier: Apache-2.0
"""PegaConnector whose engine can be made to hold its GIL, as a very long forward pass would; for benchmarks alone.

A request with `kv_transfer_params: {"hold_gil_s": 10}` stops the engine's main thread for that long.
"""

from __future__ import annotations

import ctypes
from typing import Any

from vllm_pega_connector.connector import PegaConnector

MAX_STALL_S = 60.0


class StallConnector(PegaConnector):
    def on_new_request(self, request: Any) -> None:
        seconds = (request.kv_transfer_params or {}).get("hold_gil_s", 0)
        if seconds:
            ctypes.PyDLL(None).usleep(int(min(seconds, MAX_STALL_S) * 1e6))  # PyDLL: the GIL is kept
        super().on_new_request(request)
