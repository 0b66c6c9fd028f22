# SPDX-License-Identifier: Apache-2.0
"""A few seconds of each target: its seeds, what once broke it, and mutations of both; and the fuzzer itself starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import SEEDS, TARGETS

ROOT = Path(__file__).resolve().parents[2]


def inputs(name: str) -> list[bytes]:
    return SEEDS[name] + [path.read_bytes() for path in sorted((Path(__file__).parent / "corpus" / name).glob("*"))]


def edited(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes replaced, put in, left out or repeated."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(out)))
        gone = draw(st.sampled_from((0, 1, 1, 2, 8)))
        more = draw(st.one_of(st.binary(max_size=8), st.just(bytes(out[at : at + 16])), st.sampled_from(TOKENS)))
        out[at : at + gone] = more
    return bytes(out)


TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b'"x"',
    b"[]",
    b"{}",
    b"\xc0",
    b"\xff\xff\xff\xff",
    b"\xd9\xff",
    b"\n",
    b":",
)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_and_their_mutations_do_no_harm(name: str) -> None:
    target, known = TARGETS[name], inputs(name)
    for data in [*known, b"", b"\0"]:
        target(data)

    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )  # fmt: skip
    @given(st.data())
    def mutate(data: st.DataObject) -> None:
        target(edited(data.draw, data.draw(st.sampled_from(known))))

    mutate()


def test_a_target_that_breaks_is_seen(tmp_path: Path) -> None:
    """The driver, guided by what is executed: it must find the two bytes that this target does not bear."""
    pytest.importorskip("atheris")
    code = (
        "import atheris, sys\n"
        "@atheris.instrument_func\n"
        "def target(data):\n"
        "    if len(data) > 1 and data[0] == ord('p') and data[1] == ord('e'):\n"
        "        raise AssertionError\n"
        f"atheris.Setup([sys.argv[0], '-max_total_time=20', '-artifact_prefix={tmp_path}/'], target)\n"
        "atheris.Fuzz()\n"
    )
    broken = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert broken.returncode != 0 and "AssertionError" in broken.stdout + broken.stderr
    fine = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--target", "peer_request", "--seconds", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert fine.returncode == 0, fine.stderr[-2000:]
    assert "stat::number_of_executed_units" in fine.stderr
