# SPDX-License-Identifier: Apache-2.0
"""Synthetic request traces in Mooncake's format: made up by a seed, with a published trace's shape.

    python benchmarks/mooncake_trace.py --profile conversation --requests 1000 > trace.jsonl

A line is {"timestamp": ms, "input_length", "output_length", "hash_ids"}; one hash id stands for a block of 512 tokens
together with all that precedes it, so equal ids are equal prefixes. The requests form trees: conversations begin with
one of a few shared prompts, go on turn by turn, and some turns are asked twice and continue differently.

The profiles aim at what the traces published with Mooncake (FAST '25) hold, as counted from the files: mean input and
output length, and the share of blocks that a cache without bounds would have had ("hit rate").
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 512
Entry = dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """A trace's target figures, and the parameters with which trees of requests come near them."""

    mean_input: int
    mean_output: int
    hit_rate: float
    requests_per_s: float
    first_tokens: float  # median length of a conversation's first request
    spread: float  # of lengths: sigma of their log
    turn_tokens: float  # median of what a later turn adds to the answer before it
    continue_share: float  # requests that continue a conversation
    shared_blocks: int  # length of the prompts that conversations share at their start
    shared_share: float  # conversations that begin with one
    longest: int = 126_000


PROFILES = {
    "conversation": Profile(12_035, 343, 0.366, 3.4, 5_600, 1.25, 900, 0.36, 4, 0.3),
    "synthetic": Profile(15_325, 149, 0.640, 3.9, 7_600, 0.95, 850, 0.62, 8, 0.5),
}
SHARED_PROMPTS = 8
LIVE = 64  # conversations that may still go on


@dataclass
class _Conversation:
    tokens: int
    ids: list[int] = field(default_factory=list)  # of its full blocks


def generate(profile: Profile, requests: int, seed: int) -> list[Entry]:
    """The trace's lines, by time."""
    rng = random.Random(seed)
    fresh = iter(range(1 << 40))
    shared = [[next(fresh) for _ in range(profile.shared_blocks)] for _ in range(SHARED_PROMPTS)]
    live: list[_Conversation] = []
    entries: list[Entry] = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(profile.requests_per_s) * 1e3
        output = max(1, min(2000, round(rng.lognormvariate(0, 0.8) * profile.mean_output / 1.377)))
        if live and rng.random() < profile.continue_share:
            before = live.pop(rng.randrange(len(live)))
            talk = _Conversation(before.tokens + round(rng.lognormvariate(0, 0.8) * profile.turn_tokens), before.ids[:])
        else:
            talk = _Conversation(max(16, round(rng.lognormvariate(0, profile.spread) * profile.first_tokens)))
            if rng.random() < profile.shared_share:
                talk.ids = rng.choice(shared)[:]
                talk.tokens += len(talk.ids) * BLOCK
        if talk.tokens > profile.longest:
            talk = _Conversation(rng.randint(BLOCK, profile.longest))
        talk.ids += [next(fresh) for _ in range(talk.tokens // BLOCK - len(talk.ids))]
        # A block that is not full yet becomes another once it is: its id is never seen again.
        partial = [next(fresh)] if talk.tokens % BLOCK else []
        entries.append({"timestamp": round(now), "input_length": talk.tokens, "output_length": output,
                        "hash_ids": talk.ids + partial})  # fmt: skip
        # The answer becomes part of the next turn, where it is computed anew as far as caches of prompts know.
        live.append(_Conversation(talk.tokens + output, talk.ids))
        if len(live) > LIVE:
            live.pop(0)
    return entries


def hit_rate(entries: Sequence[Entry]) -> float:
    """Of all blocks asked for, the share that an unbounded cache would have."""
    seen: set[int] = set()
    total = 0
    for entry in entries:
        total += len(entry["hash_ids"])
        seen.update(entry["hash_ids"])
    return 1 - len(seen) / total


def scaled(entries: Sequence[Entry], block: int, time_factor: float, longest: int) -> list[Entry]:
    """The same tree with `block` tokens a block, at another pace: for models that are smaller than the trace's.

    Requests of more than `longest` tokens are left out.
    """
    out = []
    for entry in entries:
        tokens = max(1, entry["input_length"] * block // BLOCK)
        if tokens <= longest:
            out.append({
                "timestamp": round(entry["timestamp"] * time_factor),
                "input_length": tokens,
                "output_length": max(1, entry["output_length"] * block // BLOCK),
                "hash_ids": entry["hash_ids"][: -(-tokens // block)],
            })  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="conversation")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    entries = generate(PROFILES[args.profile], args.requests, args.seed)
    sys.stdout.writelines(json.dumps(entry) + "\n" for entry in entries)
    print(f"unbounded cache: hit rate {hit_rate(entries):.3f}", file=sys.stderr)


if __name__ == "__main__":
    main()
