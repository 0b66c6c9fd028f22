# SPDX-License-Identifier: Apache-2.0
"""Every key of the configuration right and wrong, the environment, and parameters of a request."""

import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_pega_connector.address import HostPort, parse_host, parse_source
from vllm_pega_connector.config import ConfigError, PegaConfig, PolicyConfig, RequestParams

LISTEN = {"listen": "127.0.0.1:0"}


def load(extra, env=None):
    return PegaConfig.from_extra_config(extra, env or {})


def problems(extra, env=None):
    with pytest.raises(ConfigError) as caught:
        load(extra, env)
    assert isinstance(caught.value, ValueError)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def test_defaults_are_the_documented_ones():
    config = load({})
    assert config.model_dump() == {
        "host_pool_gib": "auto",
        "kv_layout": "auto",
        "load_policy": PolicyConfig().model_dump(),
        "save_policy": PolicyConfig().model_dump(),
        "objective": "balanced",
        "device_profile": "auto",
        "eviction": "lru",
        "save_decode": True,
        "log_decisions": False,
        "transfer_timeout_s": 30.0,
        "max_pending_save_blocks": "auto",
        "migration": None,
    }
    assert load(None) == config
    migration = load({"migration": LISTEN}).migration
    assert migration.model_dump(mode="json") == {
        "listen": "127.0.0.1:0",
        "advertise": None,
        "peers": [],
        "allow_sources": None,
        "timeout_s": 10.0,
        "auth_token_file": None,
        "model_id": None,
        "transport": "auto",
        "same_host": "auto",
        "verify": False,
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_pool_gib", 4),
        ("host_pool_gib", 0.25),
        ("kv_layout", "block"),
        ("load_policy", "staged"),
        ("save_policy", {"backend": "chunked", "chunk_descriptors": 2048, "inflight_chunks": 1}),
        ("objective", "strict"),
        ("device_profile", "/etc/pega/gpu.json"),
        ("log_decisions", True),
        ("save_decode", False),
        ("transfer_timeout_s", 1),
        ("max_pending_save_blocks", 1),
        ("migration", {**LISTEN, "peers": ["[::1]:7000", "host-b:7000"], "allow_sources": ["10.0.0.0/8", "h"]}),
    ],
)
def test_right_values_are_kept(key, value):
    config = load({key: value})
    kept = config.model_dump(mode="json", exclude_unset=True)[key]
    assert kept == ({"backend": value} if value == "staged" else value)
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, key, value)


# Each key wrong in turn: the line names the key, what was given and what is allowed.
WRONG = [
    ("host_pool_gib", 0, "0", "above 0"),
    ("host_pool_gib", -1.5, "-1.5", "above 0"),
    ("host_pool_gib", True, "true", "above 0"),
    ("host_pool_gib", "big", '"big"', '"auto"'),
    ("host_pool_gib", "4", '"4"', "GiB"),
    ("host_pool_gib", float("nan"), "NaN", "GiB"),
    ("host_pool_gib", float("inf"), "Infinity", "GiB"),
    ("host_pool_gib", 10**400, "1000", "GiB"),
    ("host_pool_gib", None, "null", "GiB"),
    ("kv_layout", "hnd", '"hnd"', "auto, vllm or block"),
    ("load_policy", "dma", '"dma"', "memcpy"),
    ("load_policy", 3, "3", "memcpy"),
    ("load_policy", None, "null", "memcpy"),
    ("save_policy", "Kernel", '"Kernel"', "kernel"),
    ("save_policy", ["kernel"], '["kernel"]', "kernel"),
    ("objective", "fast", '"fast"', "throughput, balanced, tail or strict"),
    ("device_profile", "", '""', "built-in"),
    ("device_profile", {}, "{}", "built-in"),
    ("eviction", "arc", '"arc"', "lru"),
    ("log_decisions", 1, "1", "true or false"),
    ("save_decode", 1, "1", "true or false"),
    ("save_decode", "yes", '"yes"', "true or false"),
    ("transfer_timeout_s", 0, "0", "from 0.1"),
    ("transfer_timeout_s", 1e-320, "1e-320", "from 0.1"),
    ("transfer_timeout_s", False, "false", "seconds"),
    ("transfer_timeout_s", 1e9, "1000000000.0", "86400"),
    ("max_pending_save_blocks", 0, "0", "1 or more"),
    ("max_pending_save_blocks", 2.5, "2.5", "1 or more"),
    ("max_pending_save_blocks", True, "true", "1 or more"),
    ("max_pending_save_blocks", "none", '"none"', "auto"),
    ("migration", [], "[]", "listen"),
    ("migration", "on", '"on"', "listen"),
]


@pytest.mark.parametrize(("key", "value", "shown", "allowed"), WRONG)
def test_wrong_values_are_named(key, value, shown, allowed):
    (line,) = problems({key: value})
    path, rest = line.split(": ", 1)
    assert path.split(".")[0] == key
    assert "got " + shown in rest
    assert allowed in rest.split("allowed: ")[1]


def test_every_key_is_wrong_once():
    assert {key for key, *_ in WRONG} == set(PegaConfig.model_fields)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_grid_blocks", 0, "1 to 65535"),
        ("max_grid_blocks", 65536, "1 to 65535"),
        ("max_grid_blocks", True, "1 to 65535"),
        ("max_grid_blocks", 8.0, "1 to 65535"),
        ("chunk_descriptors", 1 << 21, "1 to 1048576"),
        ("chunk_bytes", 1023, "1024"),
        ("chunk_bytes", "1MiB", "1024"),
        ("inflight_chunks", 65, "1 to 64"),
        ("backend", "auto ", "auto, memcpy"),
    ],
)
def test_fields_of_a_policy(field, value, allowed):
    (line,) = problems({"load_policy": {field: value}})
    assert line.startswith(f"load_policy.{field}: got {json.dumps(value)}")
    assert allowed in line


@pytest.mark.parametrize(
    ("migration", "path", "said"),
    [
        ({}, "migration.listen", "missing"),
        ({"listen": "::1:80"}, "migration.listen", "brackets"),
        ({"listen": "host"}, "migration.listen", "give host:port"),
        ({"listen": "host:65536"}, "migration.listen", "above 65535"),
        ({"listen": "[::g]:1"}, "migration.listen", "no IPv6 address"),
        ({"listen": 7000}, "migration.listen", "not a string"),
        ({**LISTEN, "advertise": "10.0.0.256:1"}, "migration.advertise", "neither a host name nor an IP"),
        ({**LISTEN, "peers": "h:1"}, "migration.peers", "list"),
        ({**LISTEN, "peers": ["h:1", "h:0"]}, "migration.peers[1]", "needs its port"),
        ({**LISTEN, "allow_sources": ["10.0.0.1/8"]}, "migration.allow_sources[0]", "host bits"),
        ({**LISTEN, "allow_sources": ["a b"]}, "migration.allow_sources[0]", "neither"),
        ({**LISTEN, "timeout_s": 0}, "migration.timeout_s", "from 0.1"),
        ({**LISTEN, "auth_token_file": ""}, "migration.auth_token_file", "path"),
        ({**LISTEN, "model_id": 3}, "migration.model_id", "string"),
        ({**LISTEN, "transport": "ib"}, "migration.transport", "auto, tcp, rdma or nvlink"),
        ({**LISTEN, "same_host": True}, "migration.same_host", "auto or off"),
        ({**LISTEN, "verify": "no"}, "migration.verify", "true or false"),
        ({**LISTEN, "peer": []}, "migration.peer", "did you mean peers?"),
    ],
)
def test_fields_of_migration(migration, path, said):
    (line,) = problems({"migration": migration})
    assert line.startswith(path + ": ")
    assert said in line


def test_unknown_keys_are_refused_with_advice():
    assert "did you mean host_pool_gib?" in problems({"host_pool_gb": 1})[0]
    assert "allowed: host_pool_gib, kv_layout" in problems({"zzz": 1})[0]
    assert "MultiConnector" in problems({"connectors": []})[0]
    assert "one level up" in problems({"kv_load_failure_policy": "recompute"})[0]
    assert "must be a string" in problems({1: 2})[0]


def test_all_problems_are_told_at_once():
    lines = problems({"objective": "x", "eviction": "y", "load_policy": {"backend": "z", "chunk_bytes": 0}})
    assert [line.split(":")[0] for line in lines] == ["load_policy.backend", "load_policy.chunk_bytes", "objective",
                                                      "eviction"]  # fmt: skip


@pytest.mark.parametrize("extra", ["text", 3, [], [["host_pool_gib", 1]]])
def test_the_whole_must_be_an_object(extra):
    assert "JSON object" in problems(extra)[0]


def test_environment_overrides_scalar_keys():
    env = {
        "VLLM_PEGA_HOST_POOL_GIB": "2.5",
        "VLLM_PEGA_SAVE_POLICY": "Memcpy",
        "VLLM_PEGA_SAVE_DECODE": "off",
        "VLLM_PEGA_MAX_PENDING_SAVE_BLOCKS": "7",
        "VLLM_PEGA_DEVICE_PROFILE": "Some/Path.json",
        "VLLM_PEGA_OBJECTIVE": "",  # empty: not set
        "PATH": "/bin",
    }
    config = load({"host_pool_gib": 1, "objective": "tail"}, env)
    assert config.host_pool_gib == 2.5
    assert config.save_policy == PolicyConfig(backend="memcpy")
    assert config.save_decode is False
    assert config.max_pending_save_blocks == 7
    assert config.device_profile == "Some/Path.json"
    assert config.objective == "tail"
    assert load({}, {"VLLM_PEGA_HOST_POOL_GIB": "AUTO"}).host_pool_gib == "auto"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("VLLM_PEGA_HOST_POOL_GIB", "much", "VLLM_PEGA_HOST_POOL_GIB: got"),
        ("VLLM_PEGA_HOST_POOL_GIB", "nan", "VLLM_PEGA_HOST_POOL_GIB: got"),
        ("VLLM_PEGA_SAVE_DECODE", "maybe", "VLLM_PEGA_SAVE_DECODE: got"),
        ("VLLM_PEGA_MAX_PENDING_SAVE_BLOCKS", "1.5", "VLLM_PEGA_MAX_PENDING_SAVE_BLOCKS: got"),
        ("VLLM_PEGA_OBJECTVE", "tail", "did you mean VLLM_PEGA_OBJECTIVE?"),
        ("VLLM_PEGA_MIGRATION", "{}", "is an object"),
        ("VLLM_PEGA_ZZZ", "1", "unset it"),
    ],
)
def test_bad_environment_names_the_variable(variable, value, said):
    (line,) = problems({}, {variable: value})
    assert line.startswith(variable)
    assert said in line


def test_auth_token(tmp_path):
    file = tmp_path / "token"
    config = load({"migration": {**LISTEN, "auth_token_file": str(file)}}).migration
    with pytest.raises(ConfigError, match=r"cannot read .*token: No such file"):
        config.auth_token()
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        config.auth_token()
    file.write_text("secret\n")
    assert config.auth_token() == b"secret"
    assert load({"migration": LISTEN}).migration.auth_token() is None


@pytest.mark.parametrize("text", ["1.2.3.4:0", "[::1]:65535", "[fe80::1%eth0]:7", "node-1.example.com:80", "n:1"])
def test_endpoints_read_back(text):
    assert str(HostPort.parse(text)) == text
    assert HostPort.parse(str(HostPort.parse(text))) == HostPort.parse(text)


@given(st.text(max_size=30))
def test_endpoints_are_parsed_or_refused(text):
    try:
        endpoint = HostPort.parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert HostPort.parse(str(endpoint)) == endpoint
        assert 0 <= endpoint.port <= 65535


def test_hosts_and_sources():
    assert parse_host("Node-1") == "node-1"
    assert parse_source("[0:0::1]") == "::1"
    assert parse_source("10.1.0.0/16") == "10.1.0.0/16"
    for wrong in ("", "a..b", "-a", "1.2.3", "a" * 64, "10.0.0.0/33", "x/8"):
        with pytest.raises(ValueError, match=r"."):
            parse_source(wrong)


# --- per request ---

CONFIG = load({"migration": LISTEN})


def test_request_without_parameters_has_defaults():
    for nothing in (None, {}, {"pega": None}, {"pega": {}}, {"other": 1}):
        assert RequestParams.parse(nothing, CONFIG) == RequestParams()


def test_request_parameters():
    params = RequestParams.parse(
        {"pega": {"source": "[::1]:7", "load_policy": "staged", "save_policy": {"max_grid_blocks": 4}, "save": False}},
        CONFIG,
    )
    assert params == RequestParams(
        HostPort("::1", 7), PolicyConfig(backend="staged"), PolicyConfig(max_grid_blocks=4), save=False
    )


def test_what_we_hand_out_may_come_back_in():
    params = RequestParams.parse({"pega": {"source": "h:7", "blocks": 3, "fingerprint": "ab"}}, CONFIG)
    assert params == RequestParams(source=HostPort("h", 7), fingerprint="ab")


@pytest.mark.parametrize(
    ("pega", "said"),
    [
        (3, "allowed: an object"),
        ({"source": "h"}, "source: got"),
        ({"source": "h:0"}, "source: got"),
        ({"load_policy": "x"}, "load_policy.backend: got"),
        ({"save": "no"}, "save: got"),
        ({"sauce": "h:1"}, "did you mean source?"),
        ({1: 2}, "must be a string"),
    ],
)
def test_a_wrong_parameter_is_left_out(pega, said):
    given_params = {**pega, "save_policy": "memcpy"} if isinstance(pega, dict) else pega
    params = RequestParams.parse({"pega": given_params}, CONFIG)
    assert said in params.problems[0]
    assert params.source is None and params.load_policy is None and params.save is True
    if isinstance(pega, dict):
        assert params.save_policy == PolicyConfig(backend="memcpy")


def test_source_without_migration_is_a_problem():
    params = RequestParams.parse({"pega": {"source": "h:1"}}, load({}))
    assert params.source is None
    assert "not configured" in params.problems[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["source", "load_policy", "save_policy", "save", "blocks", "fingerprint", "x"])


@given(st.one_of(JSON, st.fixed_dictionaries({"pega": JSON | st.dictionaries(KEYS, JSON)})))
def test_nothing_a_client_sends_raises(value):
    params = RequestParams.parse(value, CONFIG)
    assert isinstance(params.save, bool)
    assert len(params.problems) <= 8


def test_deep_nesting_does_not_raise():
    deep: dict = {}
    for _ in range(20_000):
        deep = {"a": deep}
    assert RequestParams.parse({"pega": {"load_policy": deep}}, CONFIG).problems


@given(st.dictionaries(st.sampled_from(sorted(PegaConfig.model_fields)), JSON, max_size=4))
@example({"save_policy": {"\n": None}})
def test_any_configuration_is_taken_or_refused_in_lines(extra):
    try:
        config = load(extra)
    except ConfigError as error:
        assert error.problems
        assert all(line and "\n" not in line for line in error.problems)
    else:
        assert load(config.model_dump(mode="json", exclude_none=True)) == config


def test_import_needs_neither_vllm_nor_the_native_module():
    code = (
        "import sys; sys.modules['vllm'] = None; sys.modules['vllm_pega_connector._native'] = None\n"
        "import vllm_pega_connector.config, vllm_pega_connector.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_to_native():
    native = pytest.importorskip("vllm_pega_connector._native")
    policy = PolicyConfig(backend="chunked", chunk_descriptors=5).to_native()
    assert isinstance(policy, native.Policy)
    assert (policy.backend, policy.chunk_descriptors, policy.chunk_bytes) == ("chunked", 5, 0)
