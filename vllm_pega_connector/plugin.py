# SPDX-License-Identifier: Apache-2.0
"""Entry point of vLLM's plugin loader: lets ``"kv_connector": "PegaConnector"`` be found by name alone."""


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The loader may run more than once in a process, and the factory refuses a name that it knows.
    if "PegaConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("PegaConnector", "vllm_pega_connector.connector", "PegaConnector")
