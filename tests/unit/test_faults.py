# SPDX-License-Identifier: Apache-2.0
"""VLLM_PEGA_FAULTS as text: what it means, what is refused and how that is said. What faults do is tested elsewhere."""

from __future__ import annotations

import pytest

from vllm_pega_connector import faults
from vllm_pega_connector.config import ConfigError, PegaConfig
from vllm_pega_connector.faults import Faults, Rule, Trigger, parse


def test_rules() -> None:
    assert parse(" fail chunk direction=load nth=3;delay  job rank=1 ms=200 p=0.1 seed=7; kill agent ;") == (
        Rule("fail", "chunk", direction="load", nth=3),
        Rule("delay", "job", rank=(0, 1), p=0.1, seed=7, ms=200),
        Rule("kill", "agent"),
    )
    (rule,) = parse("duplicate job rank=2.3")
    assert rule.on((2, 3)) and not rule.on((0, 3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode job", ('"explode job"', "allowed: fail job, delay job")),
        (";", ('";"', "allowed: fail job")),
        ("fail job nth=0", ("nth", '"0"', "1 or more")),
        ("fail job nth=-1", ("nth", '"-1"', "1 or more")),
        ("fail job p=1.5", ("p", '"1.5"', "0 to 1")),
        ("fail job p=nan", ("p", '"nan"', "0 to 1")),
        ("fail job rank=x", ("rank", '"x"', "PIPELINE.TENSOR")),
        ("fail job direction=up", ("direction", '"up"', "load or save")),
        ("delay job ms=-1", ("ms", '"-1"', "0 to 600000")),
        ("delay job", ("ms is missing", "milliseconds")),
        ("fail job ms=3", ('"ms=3"', "allowed: direction, rank, nth, p, seed")),
        ("fill pool rank=1", ('"rank=1"', "allowed: nth, p, seed")),
        ("fail job nth=1 p=0.5", ("exclude each other",)),
        ("fail job nth=1 nth=2", ('"nth=2"', "once each")),
        ("fail job 3", ('"3"', "allowed: direction")),
    ],
)
def test_a_bad_value_says_what_was_given_and_what_is_allowed(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Faults.from_environment({"VLLM_PEGA_FAULTS": text})
    for word in ("VLLM_PEGA_FAULTS", *words):
        assert word in str(caught.value)


def test_every_bad_rule_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("fail job nth=0; kill agent; fill sink")
    assert len(caught.value.problems) == 2


def test_off_means_nothing_is_wrapped() -> None:
    off = Faults.from_environment({"VLLM_PEGA_FAULTS": ""})
    things = [object() for _ in range(3)]
    assert off.device(things[0], (0, 0)) is things[0]
    assert off.engine(things[1], things[0], (0, 0)) is things[1]
    assert off.scheduler(things[2]) is things[2]


def test_a_release_build_refuses_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "built", lambda: False)
    assert Faults.from_environment({}) == Faults()
    with pytest.raises(ConfigError, match=r'VLLM_PEGA_FAULTS: got "fail job".*release build.*unset it'):
        Faults.from_environment({"VLLM_PEGA_FAULTS": "fail job"})


def test_it_is_no_setting() -> None:
    assert PegaConfig.from_extra_config({}, env={"VLLM_PEGA_FAULTS": "fail job"}) == PegaConfig()
    with pytest.raises(ConfigError, match="VLLM_PEGA_FAULT: no such setting"):
        PegaConfig.from_extra_config({}, env={"VLLM_PEGA_FAULT": "fail job"})


def test_when_a_rule_acts() -> None:
    third = Trigger(Rule("fail", "job", direction="save", nth=3), (0, 0))
    directions = ["save", "load", "save", "load", "save", "save"]
    assert [third.fires(d) for d in directions] == [False, False, False, False, True, False]
    often = Rule("fail", "job", p=0.3, seed=5)
    one, same, other = (Trigger(often, rank) for rank in ((0, 0), (0, 0), (0, 1)))
    acts = [one.fires() for _ in range(200)]
    assert acts == [same.fires() for _ in range(200)] != [other.fires() for _ in range(200)]
    assert 30 < sum(acts) < 90
