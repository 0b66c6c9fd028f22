# SPDX-License-Identifier: Apache-2.0
"""`pega calibrate` on the host device: everything measured, a valid profile, and Auto led by what was measured."""

import copy
import importlib.util
import json
import math
from itertools import product

import jsonschema
import pytest

from vllm_pega_connector import calibrate, calibrate_bench, cli
from vllm_pega_connector.profile import BUILT_IN, built_in_names, load_profile

native = pytest.importorskip("vllm_pega_connector._native")

SIZES, GIB = sorted(calibrate.SIZES), 1 << 30
EVERY_CELL = list(product(calibrate.DIRECTIONS, SIZES))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One quick run for all tests of this file."""
    path = tmp_path_factory.mktemp("calibrate") / "profile.json"
    assert cli.main(["calibrate", "--device", "host", "--quick", "--json", "--out", str(path)]) == 0
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    return path


@pytest.fixture
def profile(out):
    return load_profile(str(out))


def decide(profile, direction, size, objective="throughput"):
    ranges = 2 * GIB // size
    shape = native.TransferShape(direction, ranges, 2 * GIB, size, size)
    return native.decide(shape, native.DeviceProfile(profile), objective, native.Policy())


def rate(profile, direction, size, decision):
    """The best measured rate of points that a decision may stand for; what a point leaves open is a default."""
    fields = ("grid", "chunk_descriptors", "chunk_bytes")
    decided = (decision.max_grid_blocks, decision.chunk_descriptors, decision.chunk_bytes)
    return max(
        p["gib_per_s"]
        for p in profile["directions"][direction]["curve"]
        if (p["backend"], p["range_bytes"]) == (decision.backend, size)
        and all(p[field] in (0, value) for field, value in zip(fields, decided, strict=True))
    )


def test_the_profile_fits_the_published_schema(out):
    jsonschema.validate(json.loads(out.read_text()), json.loads((BUILT_IN / "schema.json").read_text()))


def test_every_setting_is_measured(profile):
    settings = calibrate.PLANS["host", True].settings
    assert {s.backend for s in settings} == set(calibrate.BACKENDS)
    for direction in calibrate.DIRECTIONS:
        side = profile["directions"][direction]
        for kind, sizes, value in (("curve", SIZES, "gib_per_s"), ("interference", [4096], "p99_growth")):
            wanted = {(*s.model_dump().values(), size) for s, size in product(settings, sizes)}
            measured = [(*(p[f] for f in calibrate.Setting.model_fields), p["range_bytes"]) for p in side[kind]]
            assert set(measured) == wanted and len(measured) == len(wanted)
            assert all(math.isfinite(p[value]) and p["source"] == "measured" for p in side[kind])
        assert all(p["gib_per_s"] > 0 for p in side["curve"])
        assert side["contiguous_gib_per_s"] > 0
        assert all(side["latency_us"][backend] > 0 for backend in calibrate.BACKENDS)


def test_provenance_tells_the_noise(profile):
    assert "p99 of the runs without transfer" in profile["provenance"]["notes"][0]
    assert profile["provenance"]["date"] and "host device" in profile["provenance"]["gpu"]


@pytest.mark.parametrize(("direction", "size"), EVERY_CELL)
def test_throughput_is_within_ten_percent_of_the_best_setting(profile, direction, size):
    best = max(p["gib_per_s"] for p in profile["directions"][direction]["curve"] if p["range_bytes"] == size)
    assert rate(profile, direction, size, decide(profile, direction, size)) >= 0.9 * best


@pytest.mark.parametrize("direction", calibrate.DIRECTIONS)
@pytest.mark.parametrize("name", built_in_names())
def test_so_it_is_with_the_built_in_profiles(name, direction):
    """By Auto's estimate: not every setting of these was measured with every size."""
    profile = load_profile(name)
    points = profile["directions"][direction]["curve"]
    sizes = {p["range_bytes"] for p in points}
    assert {4096, 1 << 20} <= sizes
    for size in sizes:
        number, unit = decide(profile, direction, size).reason.split(", ")[1].split()
        seconds = float(number) * {"ms": 1e-3, "s": 1.0}[unit]
        best = max(p["gib_per_s"] for p in points if p["range_bytes"] == size)
        assert 2 / seconds >= 0.9 * best, (size, number, unit, best)


@pytest.mark.parametrize("backend", calibrate.BACKENDS)
def test_a_changed_figure_changes_the_decision(profile, backend):
    for direction, size in EVERY_CELL:
        changed = copy.deepcopy(profile)
        for p in changed["directions"][direction]["curve"]:
            if p["range_bytes"] == size:
                p["gib_per_s"] = 50.0 if p["backend"] == backend else 1.0
        assert decide(changed, direction, size).backend == backend


def test_auto_hands_the_engine_what_was_measured(profile):
    """The settings that Auto fills in from the defaults are those of the measurement."""
    for direction, setting in product(calibrate.DIRECTIONS, calibrate.PLANS["host", True].settings):
        changed = copy.deepcopy(profile)
        for p in changed["directions"][direction]["curve"]:
            p["gib_per_s"] = (
                50.0 if calibrate.Setting(**{f: p[f] for f in calibrate.Setting.model_fields}) == setting else 1.0
            )
        policy = calibrate.policy_of(setting, calibrate.HOST_DEFAULTS[setting.backend])
        decision = decide(changed, direction, 4096)
        for field in ("backend", "max_grid_blocks", "chunk_descriptors", "chunk_bytes", "inflight_chunks"):
            assert getattr(decision, field) == getattr(policy, field), (setting, field)


def test_people_see_what_auto_will_do_and_a_picture(tmp_path, capsys, monkeypatch, out):
    pytest.importorskip("matplotlib")
    found = calibrate.Found()
    monkeypatch.setattr(calibrate, "calibrate", lambda place, plan, progress: progress("x", 0.5) or found)
    monkeypatch.setattr(calibrate, "profile_of", lambda *_: load_profile(str(out)))
    files = tmp_path / "p.json", tmp_path / "p.png"
    assert cli.main(["calibrate", "--device", "host", "--out", str(files[0]), "--plot", str(files[1])]) == 0
    said = capsys.readouterr().out
    assert "throughput" in said and "1 MiB" in said and str(files[0]) in said
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == sorted(files)


def fail(monkeypatch, error):
    def timed(*_):
        raise error

    monkeypatch.setattr(calibrate_bench.Bench, "timed", timed)


def test_an_interrupt_leaves_the_old_profile(tmp_path, monkeypatch):
    old = tmp_path / "p.json"
    old.write_text("old")
    fail(monkeypatch, KeyboardInterrupt())
    assert cli.main(["calibrate", "--device", "host", "--quick", "--out", str(old)]) == 130
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]


def test_a_failed_transfer_is_one_line(tmp_path, monkeypatch, capsys):
    fail(monkeypatch, RuntimeError("load moved wrong bytes"))
    assert cli.main(["calibrate", "--device", "host", "--quick", "--json", "--out", str(tmp_path / "p.json")]) == 1
    assert capsys.readouterr().err == "pega calibrate: load moved wrong bytes; no profile was written\n"
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_are_seen():
    place = calibrate_bench.HostPlace()
    policy = native.Policy("memcpy")
    with calibrate_bench.Bench(place, 4096, 1 << 20) as bench:
        moves = bench.moves()
        for direction in calibrate.DIRECTIONS:
            bench.verify(direction, moves, policy)
        moved = bench.transfer
        bench.transfer = lambda direction, rows, policy: moved(direction, rows[:-1], policy)
        for direction in calibrate.DIRECTIONS:
            with pytest.raises(RuntimeError, match=f"{direction} of 4096-byte ranges moved wrong bytes"):
                bench.verify(direction, moves, policy)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "/nowhere/p.json"], "--out: cannot write into the folder /nowhere"),
        (["--out", "/"], "--out: / is a folder"),
        (["--plot", "curves.txt"], "--plot: got curves.txt; allowed: a name that ends in .png"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, said):
    assert cli.main(["calibrate", "--device", "host", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_without_matplotlib_it_says_so_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["calibrate", "--device", "host", "--plot", str(tmp_path / "p.png")]) == 2
    assert "install vllm-pega-connector[bench]" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys, monkeypatch, tmp_path):
    no_gpu = calibrate_bench.ask_driver().__class__(problem="libcuda.so.1 not found")
    monkeypatch.setattr(calibrate_bench, "ask_driver", lambda: no_gpu)
    assert cli.main(["calibrate", "--out", str(tmp_path / "p.json")]) == 2
    err = capsys.readouterr().err
    assert err == "pega calibrate: no GPU: libcuda.so.1 not found; --device host calibrates the host device\n"
