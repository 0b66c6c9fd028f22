# SPDX-License-Identifier: Apache-2.0
"""Everything that differs between the vLLM versions we support (0.26 to 0.33), by feature, never by number."""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Support:
    """Whether the connector can serve a model under a configuration, and if not, why."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class CacheGroup:
    """What attention needs of one cache group. window: tokens that a query sees; 0 = all."""

    window: int = 0

    def first_needed(self, tokens: int, block_size: int) -> int:
        """First block that attention still reads once `tokens` are computed; vLLM frees those before it."""
        return max(0, tokens - self.window + 1) // block_size if self.window else 0

    def blocks_needed(self, block_size: int) -> int:
        """Blocks that a hit of a sliding window must have before its end."""
        return -(-(self.window - 1) // block_size)


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    return tuple(CacheGroup(sliding_window(group.kv_cache_spec)) for group in kv_cache_config.kv_cache_groups)


def sliding_window(spec: Any) -> int:
    """Tokens in the window of a sliding-window spec, 0 for any other; what vLLM retains beyond it counts."""
    layers = getattr(spec, "kv_cache_specs", None)
    if layers:
        return max(sliding_window(s) for s in layers.values())
    if type(spec).__name__ != "SlidingWindowSpec":
        return 0
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def loads_fail_whole(kv_cache_config: Any) -> bool:
    """Whether a failed load must be reported for the whole request, not for single blocks: with several cache groups
    vLLM's block reports do not work, and before a window there is nothing to go on from."""
    groups = cache_groups(kv_cache_config)
    return len(groups) > 1 or any(group.window for group in groups)


def can_fail_whole() -> bool:
    """Whether this vLLM lets a worker report a whole request's load as failed (0.30 and newer)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def overlooks_loaded() -> bool:
    """Whether this vLLM's scheduler, once it finds no room for a waiting request, looks at none behind it: not even at
    one whose load has arrived and that holds the very blocks. Newer ones keep those in a queue of their own, first."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "kv_holding_waiting" not in Scheduler.__init__.__code__.co_names  # the names of its attributes are there


def unreserved_tokens(vllm_config: Any) -> int:
    """Room that a request with drafts takes when it starts, in tokens, where this vLLM keeps none free for those that
    load: two loads that it lets in at once may both be left without. 0 where it does, and without drafts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    spec, reserve = vllm_config.speculative_config, getattr(Scheduler, "_request_remaining_blocks", None)
    if spec is None or reserve is None or "num_spec_tokens" in reserve.__code__.co_names:
        return 0
    return 1 + 2 * int(spec.num_speculative_tokens)  # as newer ones reckon: the drafts, and as much of lookahead


def full_attention_only(spec: Any) -> bool:
    """True if every layer of this cache spec keeps all tokens (dense attention, MLA)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: one spec a layer
    if layers:
        return all(full_attention_only(s) for s in layers.values())
    if not isinstance(spec, FullAttentionSpec):
        return False
    # A sliding window or attention chunk merged into a "full" spec keeps all blocks, so it is fine to cache.
    return type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec")


def check_support(vllm_config: Any, kv_cache_config: Any) -> Support:
    """What we can cache today. The answer is the same on the scheduler and on every worker."""
    if kv_cache_config is None or not kv_cache_config.kv_cache_groups:
        return Support("this model has no KV cache")
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        spec = group.kv_cache_spec
        if not full_attention_only(spec) and not sliding_window(spec):
            return Support(
                f"{type(spec).__name__} is not supported: only full attention, MLA and sliding windows "
                "(recurrent state cannot be restored at every block)"
            )
    if not vllm_config.cache_config.enable_prefix_caching:
        return Support("prefix caching is off, so blocks have no keys: start vLLM with --enable-prefix-caching")
    parallel = vllm_config.parallel_config
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, size, 1) > 1:
            return Support(f"{size} > 1 is not supported")
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) > 1:
        return Support(f"cache groups with blocks of different sizes ({sizes} tokens) are not supported")
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    if unit not in (None, sizes[0]):
        return Support(f"prefix_match_unit={unit} is not supported: blocks of {sizes[0]} tokens are what has keys here")
    return Support()


def hash_bytes(vllm_config: Any) -> int:
    """Length of one block hash in bytes under the configured algorithm."""
    from vllm.utils.hashing import get_hash_fn_by_name

    return len(get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)(b""))


def pool_hash(block_hash: bytes, group: int) -> bytes:
    """A block's hash as vLLM's block pool stores it for one cache group."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    return make_block_hash_with_group_id(block_hash, group)  # type: ignore[arg-type]


def drops_last_hit_block(vllm_config: Any) -> bool:
    """EAGLE and MTP heads need the last hit block's hidden states recomputed; vLLM drops it from its own hits too."""
    spec = vllm_config.speculative_config
    if spec is None:
        return False
    drops = getattr(spec, "use_eagle_block_drop", spec.use_eagle)
    return bool(drops())


def host_memory() -> Any:
    """What vLLM's metrics call the tier our tokens come from; None where it does not tell tiers apart."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def wants_kv_events(vllm_config: Any) -> bool:
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def event_groups(kv_cache_config: Any) -> list[dict[str, Any]]:
    """What a KV cache event says of each cache group beside its number."""
    from vllm.v1 import kv_cache_interface

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
    if kind is None or window is None:
        return [{} for _ in specs]
    return [{"kv_cache_spec_kind": kind(spec).value, "kv_cache_spec_sliding_window": window(spec)} for spec in specs]


def make_event(event: Any, **fields: Any) -> Any:
    """A KV cache event with those of the fields that this vLLM's has."""
    return event(**{name: value for name, value in fields.items() if name in event.__struct_fields__})


def event_hash(block_hash: bytes) -> Any:
    """A block's hash as events name it: the bytes, or an integer if vLLM is told so."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)  # type: ignore[arg-type]


def alone(connector: Any) -> bool:
    """Whether vLLM knows this connector itself, and not a MultiConnector around it (asked on the worker side)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def worker_rank() -> tuple[int, int]:
    """(pipeline rank, tensor rank) of this worker, as vLLM keys handshake metadata."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


def required_layout(vllm_config: Any, kv_layout: str) -> str | None:
    """The KV layout to ask vLLM for (0.29 and newer; older ones know `prefer_cross_layer_blocks` instead).

    "block" asks for blocks outermost: one block of all layers is one range. vLLM drops the wish with a warning where
    its attention backend cannot do it. CPU vLLM has one layout only.
    """
    if kv_layout != "block" or vllm_config.device_config.device_type == "cpu":
        return None
    try:
        import vllm.v1.kv_cache_layout  # noqa: F401
    except ImportError:
        return None
    return "BLNHC"


NONE_HASH_WAIT_S = 60.0  # vLLM draws it within milliseconds after the workers' handshake


def hash_seed_problem(vllm_config: Any) -> str:
    """Why block hashes of two instances cannot be compared, with the mending; "" if they can."""
    from vllm.v1.core import kv_cache_utils

    if os.getenv("PYTHONHASHSEED"):
        return ""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and algorithm.startswith("sha256"):
        return ""
    return (
        f"this vLLM draws the seed of its {algorithm} block hashes at random, so no two instances' keys are alike: "
        "set PYTHONHASHSEED to the same number on all of them"
    )


def kv_fingerprint(vllm_config: Any, kv_cache_config: Any, model_id: str | None, layouts: list[str]) -> dict[str, str]:
    """What must be equal for two instances' KV to be interchangeable. Waits for vLLM's hash seed: not for its main
    thread. Raises RuntimeError if there is none after a minute."""
    from vllm.v1.core import kv_cache_utils

    deadline = time.monotonic() + NONE_HASH_WAIT_S
    while not hasattr(kv_cache_utils, "NONE_HASH"):
        if time.monotonic() > deadline:
            raise RuntimeError("vLLM has no hash seed, so blocks have no keys")
        time.sleep(0.01)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    groups = [(type(g.kv_cache_spec).__name__, len(g.layer_names)) for g in kv_cache_config.kv_cache_groups]
    return {
        "model": model_id or _model_identity(model),
        "dtype": f"{model.dtype} / {cache.cache_dtype}",
        "block_size": str(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size),
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": hashlib.sha256(kv_cache_utils.NONE_HASH).hexdigest()[:16],
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "groups": repr(groups),
        "layout": " ".join([*layouts, _kernel_layout(vllm_config)]),
    }


def _model_identity(model: Any) -> str:
    """Name, revision and a digest of the configuration: two fine-tunes of one architecture must not look alike."""
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{model.model}@{model.revision or 'main'} {digest} (set migration.model_id if only the path differs)"


def _kernel_layout(vllm_config: Any) -> str:
    """CPU attention packs keys as the instruction set likes them; on GPUs the tensors' shapes say everything."""
    if vllm_config.device_config.device_type != "cpu":
        return vllm_config.device_config.device_type  # type: ignore[no-any-return]
    import torch

    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{' AMX' if amx else ''}"
