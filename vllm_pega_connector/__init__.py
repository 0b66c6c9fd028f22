# SPDX-License-Identifier: Apache-2.0
"""A vLLM KV connector that moves KV cache without decode latency noticing.

Importing this package touches no GPU and starts nothing: vLLM imports it in its API-server process too.
``PegaConnector`` is resolved on first use, so that the command line never imports vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_pega_connector.connector import PegaConnector

__all__ = ["PegaConnector"]


def __getattr__(name: str) -> Any:
    if name == "PegaConnector":
        from vllm_pega_connector.connector import PegaConnector

        return PegaConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
