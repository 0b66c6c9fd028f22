# SPDX-License-Identifier: Apache-2.0
"""The Auto policy over the built-in profiles: total, deterministic, explained, and led by the profile alone."""

import copy
import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pega_connector import profile as profiles
from vllm_pega_connector.config import ConfigError
from vllm_pega_connector.profile import BUILT_IN, load_profile, match_gpu, read_profile, schema, write_profile

native = pytest.importorskip("vllm_pega_connector._native")

KIB, MIB, GIB = 2**10, 2**20, 2**30
NAMES = ("generic", "h200", "host", "rtx5090")
OBJECTIVES = ("throughput", "balanced", "tail", "strict")
BACKENDS = ("memcpy", "kernel", "chunked", "staged")
FIELDS = ("backend", "max_grid_blocks", "chunk_descriptors", "chunk_bytes", "inflight_chunks", "reason")
DICTS = {name: load_profile(name) for name in NAMES}
PROFILES = {name: native.DeviceProfile(DICTS[name]) for name in NAMES}


def decide(profile, ranges, range_bytes, objective="balanced", direction="load", alignment=16, **policy):
    shape = native.TransferShape(direction, ranges, ranges * range_bytes, range_bytes, range_bytes, alignment)
    if isinstance(profile, str):
        profile = PROFILES[profile]
    return native.decide(shape, profile, objective, native.Policy(**policy))


def as_dict(decision):
    return {field: getattr(decision, field) for field in FIELDS}


# --- profiles as data ---


def test_the_built_in_profiles_are_these():
    assert tuple(profiles.built_in_names()) == NAMES


def test_the_published_schema_is_the_models():
    assert json.loads((BUILT_IN / "schema.json").read_text()) == schema()


@pytest.mark.parametrize("name", NAMES)
def test_built_in_profiles_fit_the_schema(name):
    data = json.loads((BUILT_IN / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema()).validate(data)
    assert data["name"] == name
    assert data["provenance"]["method"]
    sources = {p.get("source", "measured") for d in data["directions"].values() for p in d["curve"]}
    assert {"h200": "measured", "rtx5090": "measured", "generic": "derived", "host": "estimate"}[name] in sources
    assert name in ("h200", "rtx5090") or "measured" not in sources


@pytest.mark.parametrize("name", NAMES)
def test_written_profiles_read_back(name, tmp_path):
    write_profile(DICTS[name], tmp_path / "copy.json")
    assert read_profile(tmp_path / "copy.json") == DICTS[name]
    assert (tmp_path / "copy.json").read_text() == (BUILT_IN / f"{name}.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["copy.json"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GH200 480GB", "generic"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 50901", "generic"),
        ("NVIDIA A100-SXM4-80GB", "generic"),
        ("cpu", "host"),
        ("", "host"),
    ],
)
def test_auto_matches_the_gpu(gpu, name):
    assert match_gpu(gpu) == name
    assert load_profile("auto", gpu)["name"] == name
    assert load_profile("h200", gpu)["name"] == "h200"


def test_profile_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match=r'got "h100"; allowed: auto, generic, h200, host, rtx5090'):
        load_profile("h100")
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        load_profile(str(tmp_path / "none.json"))
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: the file: Invalid JSON"):
        load_profile(str(bad))
    data = copy.deepcopy(DICTS["host"])
    data["directions"]["save"]["curve"][0]["gib_per_s"] = -1
    bad.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"directions\.save\.curve\.0\.gib_per_s: .*greater than 0"):
        load_profile(str(bad))
    data = copy.deepcopy(DICTS["host"])
    data["directions"]["load"]["curve"] = [p for p in data["directions"]["load"]["curve"] if p["backend"] != "memcpy"]
    bad.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="memcpy must be measured"):
        load_profile(str(bad))


# --- the case that started it: 16,384 ranges of 4 KiB ---


@pytest.mark.parametrize("direction", ["load", "save"])
def test_rtx5090_follows_the_published_proposals(direction):
    balanced = decide("rtx5090", 16384, 4 * KIB, "balanced", direction)
    assert (balanced.backend, balanced.max_grid_blocks) == ("kernel", 256)
    tail = decide("rtx5090", 16384, 4 * KIB, "tail", direction)
    assert (tail.backend, tail.chunk_descriptors, tail.inflight_chunks) == ("chunked", 2048, 1)
    assert tail.chunk_bytes >= 2048 * 4 * KIB  # so that the descriptors are what bounds a chunk
    assert decide("rtx5090", 16384, 4 * KIB, "strict", direction).backend == "memcpy"
    throughput = decide("rtx5090", 16384, 4 * KIB, "throughput", direction)
    assert throughput.backend == "kernel"
    for decision in (balanced, tail, throughput):
        assert decision.max_grid_blocks <= 512  # never the full grid


@pytest.mark.parametrize("objective", ["balanced", "tail", "strict"])
@pytest.mark.parametrize("range_bytes", [2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB])
def test_h200_stages_fragmented_loads(objective, range_bytes):
    decision = decide("h200", 16384, range_bytes, objective)
    assert decision.backend == "staged"
    assert decision.max_grid_blocks <= 16


@pytest.mark.parametrize("objective", ["balanced", "tail", "strict"])
@pytest.mark.parametrize("name", ["h200", "rtx5090", "generic"])
@pytest.mark.parametrize("range_bytes", [MIB, 9 * MIB // 4, 64 * MIB])
def test_few_large_ranges_load_by_memcpy(name, objective, range_bytes):
    assert decide(name, 64, range_bytes, objective).backend == "memcpy"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("direction", ["load", "save"])
def test_one_small_range_is_copied_plainly(name, objective, direction):
    decision = decide(name, 1, 4 * KIB, objective, direction)
    assert decision.backend in ("memcpy", "kernel")  # whichever answers sooner
    assert "too short" in decision.reason


def test_h200_directions_differ():
    # Saves share their queue with the decode step's token read-back: plain copies, in slices, leave it gaps.
    load = decide("h200", 4096, 64 * KIB, "balanced", "load")
    save = decide("h200", 4096, 64 * KIB, "balanced", "save")
    assert (load.backend, save.backend) == ("staged", "memcpy")


def test_at_full_speed_large_stages_save_driver_calls():
    for direction in ("load", "save"):
        fast = decide("h200", 16384, 4 * KIB, "throughput", direction)
        calm = decide("h200", 16384, 4 * KIB, "balanced", direction)
        assert (fast.backend, fast.chunk_bytes) == ("staged", 16 * MIB)
        assert (calm.backend, calm.chunk_bytes) == ("staged", 2 * MIB)


def test_what_is_spread_takes_the_smallest_setting_that_is_fast_enough():
    """Its time is given, so speed is worth nothing; unless others could not share the lane."""
    for direction in ("load", "save"):
        paced = decide("h200", 16384, 4 * KIB, "balanced", direction)
        assert (paced.backend, paced.max_grid_blocks, paced.chunk_bytes) == ("staged", 2, 2 * MIB)
    for hurried in (decide("h200", 16384, 4 * KIB, spread_us=2500), decide("h200", 2**21, 4 * KIB)):
        assert (hurried.backend, hurried.max_grid_blocks, hurried.chunk_bytes) == ("staged", 8, 4 * MIB)


def test_only_profiles_that_say_so_spread_transfers():
    """And only what is shorter: who waits for gigabytes does not wait longer."""
    for objective, ms in (("throughput", 0), ("balanced", 20), ("tail", 40), ("strict", 80)):
        assert decide("h200", 16384, 4 * KIB, objective).spread_us == ms * 1000
        assert decide("rtx5090", 16384, 4 * KIB, objective).spread_us == 0
        assert decide("h200", 2**21, 4 * KIB, objective).spread_us == 0
        assert decide("h200", 16384, 4 * KIB, objective, spread_us=7000).spread_us == 7000
        assert decide("h200", 16384, 4 * KIB, objective, backend="staged").spread_us == 0
    assert decide("h200", 1, 4 * KIB, "strict").spread_us == 0


def test_host_uses_workers_for_large_transfers_only():
    assert decide("host", 4, 64 * KIB).backend == "memcpy"
    assert decide("host", 4096, 64 * KIB).backend in ("kernel", "chunked")


def test_only_the_profile_changes_the_backend():
    data = copy.deepcopy(DICTS["h200"])
    assert decide(native.DeviceProfile(data), 16384, 4 * KIB).backend == "staged"
    side = data["directions"]["load"]
    for point in side["interference"]:
        if point["backend"] == "staged":
            point["p99_growth"] = 0.5
    assert decide(native.DeviceProfile(data), 16384, 4 * KIB).backend == "kernel"
    for point in side["curve"]:
        if point["backend"] == "memcpy":
            point["gib_per_s"] = 500.0
    side["submit_us_per_range"]["memcpy"] = 0.0
    assert decide(native.DeviceProfile(data), 16384, 4 * KIB, "throughput").backend == "memcpy"
    # The other direction never looked at this one.
    assert as_dict(decide(native.DeviceProfile(data), 16384, 4 * KIB, direction="save")) == as_dict(
        decide("h200", 16384, 4 * KIB, direction="save")
    )


# --- policies that people set ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_configured_backend_is_obeyed(name, backend):
    for objective in OBJECTIVES:
        decision = decide(name, 16384, 4 * KIB, objective, backend=backend)
        assert decision.backend == backend
        assert f"{backend} as configured" in decision.reason


def test_explicit_fields_win():
    decision = decide("h200", 16384, 4 * KIB, max_grid_blocks=3, chunk_descriptors=77, chunk_bytes=MIB + 1)
    assert (decision.max_grid_blocks, decision.chunk_descriptors, decision.chunk_bytes) == (3, 77, MIB + 1)
    decision = decide("h200", 16384, 4 * KIB, backend="kernel", inflight_chunks=5)
    assert (decision.backend, decision.inflight_chunks) == ("kernel", 5)
    assert decision.max_grid_blocks == decide("h200", 16384, 4 * KIB, backend="kernel").max_grid_blocks


def test_what_was_not_measured_is_not_chosen():
    for objective in OBJECTIVES:
        for range_bytes in (512, 4 * KIB, MIB):
            assert decide("rtx5090", 4096, range_bytes, objective).backend != "staged"
    assert "rtx5090 has no measurement of it" in decide("rtx5090", 4096, 512, backend="staged").reason


def test_misaligned_ranges_keep_off_the_kernels():
    # Byte by byte, a kernel moves a sixteenth; the gather of a stage has GPU memory's speed to spare.
    aligned = decide("generic", 4096, 64 * KIB, "throughput", "save", alignment=16)
    assert aligned.backend == "kernel"
    assert decide("generic", 4096, 64 * KIB, "throughput", "save", alignment=4).backend == "staged"
    assert decide("generic", 4096, 64 * KIB, "throughput", "save", alignment=1).backend == "memcpy"


def test_reasons_are_one_short_line():
    reason = decide("h200", 16384, 4 * KIB).reason
    assert reason == (
        "16384 ranges of 4 KiB: staged, 1.6 ms spread over 20 ms, decode p99 +1 %; "
        "memcpy would need 13 ms of submission"
    )
    shape = native.TransferShape("load", 10, 50 * KIB, 5 * KIB, 1 * KIB)
    assert native.decide(shape, PROFILES["h200"], "strict", native.Policy()).reason.startswith(
        "10 ranges of about 5 KiB"
    )
    assert decide("h200", 0, 4096).reason == "nothing to move"


# --- total and deterministic ---

SIZES = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 511, 512, 4096, 2**32, 2**63])
SETTINGS = {
    "backend": st.sampled_from(["auto", *BACKENDS]),
    "max_grid_blocks": st.integers(0, 65535),
    "chunk_descriptors": st.integers(0, 2**32 - 1),
    "chunk_bytes": st.integers(0, 2**64 - 1),
    "inflight_chunks": st.integers(0, 64),
}


@given(
    st.sampled_from(NAMES),
    st.sampled_from(["load", "save"]),
    st.tuples(SIZES, SIZES, SIZES, SIZES, st.integers(0, 32)),
    st.sampled_from(OBJECTIVES),
    st.fixed_dictionaries(SETTINGS),
)
def test_every_transfer_gets_a_whole_decision(name, direction, sizes, objective, policy):
    shape = native.TransferShape(direction, *sizes)
    decision = native.decide(shape, PROFILES[name], objective, native.Policy(**policy))
    assert decision.backend in BACKENDS
    assert decision.backend == policy["backend"] or policy["backend"] == "auto"
    for field in FIELDS[1:-1]:
        assert getattr(decision, field) >= 1
        assert policy[field] in (0, getattr(decision, field))
    assert decision.reason
    assert "\n" not in decision.reason
    assert len(decision.reason) < 160
    again = native.decide(shape, native.DeviceProfile(DICTS[name]), objective, native.Policy(**policy))
    assert as_dict(again) == as_dict(decision)


NUMBERS = st.floats() | st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e300])
POINTS = st.fixed_dictionaries({"backend": st.sampled_from(BACKENDS), "grid": st.integers(0, 9)})


@given(st.data())
def test_any_profile_gives_a_decision(data):
    """The engine must not depend on a profile's having been validated."""

    def points(value):
        drawn = data.draw(st.lists(st.tuples(POINTS, st.integers(0, 2**40), NUMBERS), max_size=4))
        return [{**point, "range_bytes": size, value: number} for point, size, number in drawn]

    side = {
        "submit_us_per_range": {"memcpy": data.draw(NUMBERS)},
        "latency_us": {"kernel": data.draw(NUMBERS)},
        "curve": points("gib_per_s"),
        "interference": points("p99_growth"),
    }
    profile = native.DeviceProfile({"name": "any", "directions": {"load": side, "save": side}})
    for objective in OBJECTIVES:
        decision = decide(profile, data.draw(st.integers(1, 10**6)), data.draw(st.integers(1, 10**9)), objective)
        assert decision.backend in BACKENDS
        assert min(getattr(decision, field) for field in FIELDS[1:-1]) >= 1


def estimate_ms(decision):
    """The time in a reason."""
    number, unit = decision.reason.split(", ")[1].split(":")[0].split(" ")
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("direction", ["load", "save"])
def test_throughput_is_within_ten_percent_of_the_best_fixed_backend(name, direction):
    for range_bytes in (512, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 16 * MIB):
        ranges = 2 * GIB // range_bytes
        auto = estimate_ms(decide(name, ranges, range_bytes, "throughput", direction))
        fixed = [decide(name, ranges, range_bytes, "throughput", direction, backend=b) for b in BACKENDS]
        best = min(estimate_ms(d) for d in fixed if "no measurement" not in d.reason)
        assert auto <= 1.1 * best, (range_bytes, auto, best)
