# SPDX-License-Identifier: Apache-2.0
"""The soak itself: it plays what it is given on a real engine, sees what goes wrong, and finds a shorter way there."""

from __future__ import annotations

import io
import itertools
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.soak import operations as ops
from tests.soak.process import GROWTH, WARM_UP, Growth, Sample
from tests.soak.seam import Seam
from tests.soak.shrink import shrink

ROOT = Path(__file__).resolve().parents[2]


def test_equal_seeds_give_equal_operations_and_a_file_gives_them_back(tmp_path: Path) -> None:
    first, again, other = (list(itertools.islice(ops.operations(seed), 600)) for seed in ("a", "a", "b"))
    assert first == again != other
    ops.write(tmp_path / "o.jsonl", first)
    assert ops.read(tmp_path / "o.jsonl") == first
    kinds = Counter(type(item).__name__ for item in first)
    assert set(kinds) == {"Start", "Add", "Step", "Abort", "Reset", "Check"}
    assert len({item.stem for item in first if isinstance(item, ops.Add)}) < kinds["Add"] / 4  # prefixes are shared


@pytest.mark.parametrize("seed", range(20))
def test_shrinking_keeps_what_is_needed_and_little_else(seed: int) -> None:
    rng = random.Random(seed)
    needed = set(rng.sample(range(200), rng.randint(1, 4)))
    tries = 0

    def fails(items: list[int]) -> bool:
        nonlocal tries
        tries += 1
        return needed <= set(items) and items == sorted(items)

    assert shrink(range(200), fails) == sorted(needed)
    assert tries < 200
    assert shrink(range(200), fails, more=lambda: False) == list(range(200))


def test_what_grows_and_does_not_shrink_again_is_a_leak() -> None:
    level = Sample(rss_mib=500, fds=60, threads=40, shared_mib=10)
    for name, bound in GROWTH.items():
        growth, said = Growth(), []
        for i in range(6 * WARM_UP):
            more = 2 * bound * (i >= 2 * WARM_UP)
            said.append(growth.add(replace(level, **{name: getattr(level, name) + more})))
        assert said[-1] and said[-1][0].startswith(name)
        assert not any(said[: 2 * WARM_UP])
        breathing = Growth()
        high = replace(level, **{name: getattr(level, name) + 2 * bound})
        assert not any(breathing.add(high if i % 3 == 0 else level) for i in range(6 * WARM_UP))


class Native:
    """An engine whose transfers all succeed."""

    def submit(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def record_event(self, stream: int) -> int:
        return 1

    def poll(self) -> list[Any]:
        return [SimpleNamespace(direction=d, status="done", error="", backend="memcpy") for d in ("load", "save")]


def test_the_seam_fails_in_every_way_and_counts() -> None:
    counts: Counter[str] = Counter()
    seam = Seam(Native(), 0.2, "seed", counts)
    refused = 0
    for _ in range(200):
        try:
            seam.record_event(0)
            refused += not seam.submit()
        except (RuntimeError, ValueError):
            refused += 1
        assert all(r.status == "done" or r.error for r in seam.poll())
    assert refused == counts["injected event"] + counts["injected refusal"] + counts["injected full queue"] > 0
    for direction in ("load", "save"):
        assert counts[f"{direction}s failed"] == counts[f"injected failed {direction}"] > 0
        assert counts[f"{direction}s done"] + counts[f"{direction}s failed"] == 200
    assert Seam(Native(), 0.0, "seed", Counter()).submit()


@pytest.mark.vllm
class TestPlayer:
    @pytest.fixture
    def player(self) -> Any:
        pytest.importorskip("vllm")
        from tests.soak.player import Job, Player

        made = Player(Job(seed="", model="", fault_rate=0), io.StringIO())
        made._reference.likely = lambda prompt: {5: -1.0, 6: -1.0000001, 7: -3.0}  # type: ignore[method-assign]
        return made

    @pytest.mark.parametrize(
        ("tokens", "aborted", "wrong"),
        [
            ([1, 5, 3], False, False),
            ([1, 5], True, False),  # what an aborted request said must be right, too
            ([1, 6, 9], False, False),  # a tie; what follows it is another text
            ([1, 7, 3], False, True),
            ([1, 8, 3], False, True),
            ([1, 5], False, True),
            ([7], True, True),
        ],
    )
    def test_a_wrong_token_fails_and_a_tie_does_not(
        self, player: Any, tokens: list[int], aborted: bool, wrong: bool
    ) -> None:
        from tests.soak.player import Failure

        run = SimpleNamespace(tokens=tokens, aborted=aborted, ask=SimpleNamespace(prompt=(9,), pega=()))
        expected = [5 if aborted and tokens == [7] else 1, 5, 3]
        if wrong:
            with pytest.raises(Failure) as failure:
                player._same(run, expected)
            assert failure.value.kind == "wrong token"
        else:
            player._same(run, expected)


@pytest.mark.vllm
def test_a_short_soak(tmp_path: Path) -> None:
    """A conversation, an abort, a second engine with another pool: on real vLLM, every token compared."""
    pytest.importorskip("vllm")
    items: list[ops.Operation] = []
    for number, config in enumerate(({"load_policy": "chunked", "save_policy": "staged"}, {"objective": "strict"})):
        options = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 256, "async_scheduling": number == 0}
        items.append(ops.Start(config, options, host_blocks=60))
        for base in (0, 100):  # the second time from the host pool
            items += [ops.Add(base + i, (i % 2, 200), (i, 33), 7, None) for i in range(4)]
            items += [ops.Step(), ops.Step(), ops.Abort(base + 3), *[ops.Step()] * 12]
            items += [ops.Add(base + 9, (0, 32), (9, 40), 7, after=base), *[ops.Step()] * 3, ops.Check("gpu")]
    ops.write(tmp_path / "o.jsonl", items)
    command = [sys.executable, "-m", "tests.soak", "--replay", str(tmp_path / "o.jsonl"), "--shrink-minutes", "0"]
    run = subprocess.run([*command, "--faults", "none"], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "engines 2  requests 20 (4 aborted" in run.stdout
