# SPDX-License-Identifier: Apache-2.0
"""Moving KV between instances: an agent beside each engine pulls blocks from other agents' host pools.

`fingerprint`, `protocol`: what peers tell each other. `agent`, `serve`, `pull`, `data`: the agent's process.
`client`: the engine's side of it. `hook`: the scheduler's questions. Nothing here imports vLLM.
"""
