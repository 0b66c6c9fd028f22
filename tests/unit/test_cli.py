# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and that bad input ends in one clear line and status 2."""

import json
import os
import subprocess
import sys

import pytest

from vllm_pega_connector import cli
from vllm_pega_connector.config import ConfigError
from vllm_pega_connector.gpu import Driver
from vllm_pega_connector.model_shape import block_shape, read_model_config

pytest.importorskip("vllm_pega_connector._native")

SEED = ["--ranges", "16384", "--range-bytes", "4096"]
QWEN3_4B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "torch_dtype": "bfloat16",
}
H200 = Driver(13000, ("NVIDIA H200",))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("VLLM_PEGA_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def pega(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run(*arguments):
        try:
            status = cli.main(list(arguments))
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def refused(result):
    """The one line that bad input gets."""
    status, out, err = result
    assert status == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("pega")
    return line


# --- explain ---


@pytest.mark.parametrize(
    ("objective", "backend", "field", "value"),
    [
        ("balanced", "kernel", "max_grid_blocks", 256),
        ("tail", "chunked", "chunk_descriptors", 2048),
        ("strict", "memcpy", "max_grid_blocks", 1),
    ],
)
def test_explain_json(pega, objective, backend, field, value):
    status, out, _ = pega("explain", *SEED, "--profile", "rtx5090", "--objective", objective, "--json")
    answer = json.loads(out)
    assert status == 0
    assert (answer["backend"], answer[field]) == (backend, value)
    assert answer["by_objective"][objective] == {key: answer[key] for key in answer["by_objective"][objective]}
    assert {name: row["backend"] for name, row in answer["by_backend"].items()} == {
        name: name for name in ("memcpy", "kernel", "chunked", "staged")
    }
    assert (answer["total_bytes"], answer["direction"]) == (64 << 20, "load")


def test_explain_for_people(pega):
    status, out, err = pega("explain", *SEED, "--profile", "h200", "--direction", "save")
    assert (status, err) == (0, "")
    assert "16384 ranges of 4 KiB: staged" in out
    assert "memcpy would need 14 ms of submission" in out
    assert "save, objective balanced, profile h200: at most 2 CTAs, stages of 2 MiB, 3 in flight" in out
    for word in ("throughput", "balanced", "tail", "strict", "memcpy", "staged"):
        assert word in out


def test_explain_takes_a_policy(pega):
    _, out, _ = pega("explain", *SEED, "--profile", "h200", "--policy", '{"max_grid_blocks": 3}', "--json")
    assert json.loads(out)["max_grid_blocks"] == 3
    _, out, _ = pega("explain", *SEED, "--profile", "h200", "--policy", "kernel", "--json")
    assert json.loads(out)["backend"] == "kernel"


def test_explain_from_a_model(pega, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    arguments = ["explain", "--model", str(tmp_path), "--blocks", "512", "--profile", "h200", "--json"]
    _, out, _ = pega(*arguments)
    answer = json.loads(out)
    assert (answer["ranges"], answer["range_bytes"]) == (512 * 36, 64 << 10)
    _, out, _ = pega(*arguments, "--tp", "8", "--layout", "split", "--dtype", "fp8")
    answer = json.loads(out)
    assert (answer["ranges"], answer["range_bytes"]) == (512 * 72, 2 << 10)
    _, out, _ = pega(*arguments, "--layout", "block", "--block-size", "32")
    answer = json.loads(out)
    assert (answer["ranges"], answer["range_bytes"], answer["backend"]) == (512, 36 * (128 << 10), "memcpy")


def test_model_shapes():
    shape = block_shape(QWEN3_4B, 16, 16, "auto", "vllm")  # more ranks than KV heads: each keeps one
    assert (shape.fragments, shape.fragment_bytes) == (36, 16 * 2 * 128 * 2)
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
    for layout in ("vllm", "split"):  # no separate V to split off, and no heads to divide by tp
        shape = block_shape(latent, 64, 8, "auto", layout)
        assert (shape.fragments, shape.fragment_bytes) == (61, 64 * 576 * 2)
    hybrid = {**QWEN3_4B, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    assert block_shape(hybrid, 16, 1, "auto", "vllm").fragments == 1


def test_multimodal_models_count_their_text_part(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": QWEN3_4B, "vision_config": {}, "num_hidden_layers": 1}))
    assert read_model_config(str(file))["num_hidden_layers"] == 36


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["nonsense"], "invalid choice"),
        (["explain"], "--ranges and --range-bytes are both needed"),
        (["explain", "--ranges", "3"], "--ranges and --range-bytes are both needed"),
        (["explain", "--model", "x"], "--model and --blocks are both needed"),
        (["explain", *SEED, "--blocks", "3"], "give either"),
        (["explain", "--ranges", "0", "--range-bytes", "1"], "--ranges: got '0'; allowed: an integer from 1"),
        (["explain", "--ranges", "-1", "--range-bytes", "1"], "--ranges"),
        (["explain", "--ranges", "1", "--range-bytes", "4 Kb b"], "--range-bytes: got '4 Kb b'; allowed"),
        (["explain", "--ranges", str(2**40), "--range-bytes", "1024GiB"], "more than 1 EiB"),
        (["explain", *SEED, "--objective", "fast"], "choose from"),
        (["explain", *SEED, "--direction", "both"], "choose from"),
        (["explain", *SEED, "--profile", "h100"], '--profile: got "h100"; allowed: auto, generic, h200, host, rtx5090'),
        (["explain", *SEED, "--profile", "/nonexistent.json"], "cannot read /nonexistent.json"),
        (["explain", *SEED, "--policy", "dma"], '--policy.backend: got "dma"; allowed: auto, memcpy'),
        (["explain", *SEED, "--policy", "{"], "--policy: { is not valid JSON"),
        (["explain", *SEED, "--policy", '{"chunk": 1}'], "did you mean chunk_bytes?"),
        (["explain", "--model", "/nonexistent", "--blocks", "1"], "cannot read /nonexistent"),
        (["config"], "required: JSON"),
        (["config", ""], "not valid JSON"),
        (["config", "{'a': 1}"], "single quotes for the shell"),
        (["config", "[1]"], "a configuration is a JSON object, not list"),
        (["config", "{}{}"], "not valid JSON: Extra data at line 1, column 3"),
        (["config", '{"host_pool_gib": ' + "9" * 5000 + "}"], "a number has too many digits"),
        (["config", '{"device_profile": "/dev/zero"}'], "cannot read /dev/zero: larger than 1024 KiB"),
        (["config", "/dev/zero"], "larger than 1024 KiB"),
        (["config", "/nonexistent.json"], "neither a JSON object nor a readable file"),
        (["config", '{"objective": 1, "objective": 2}'], "objective: given more than once"),
        (["config", '{"objective": "fast"}'], 'objective: got "fast"; allowed: throughput'),
        (["config", '{"device_profile": "h100"}'], 'got "h100"'),
        (["config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'], 'got "NixlConnector"'),
        (["config", '{"kv_connector": "PegaConnector"}'], "kv_role: got null; allowed: kv_both"),
        (["config", '{"kv_connector":"PegaConnector","kv_role":"kv_both","objective":"tail"}'], "belongs into"),
        (["config", '{"kv_connector":"PegaConnector","kv_role":"kv_both","kv_connector_module_path":"x"}'], '"x"'),
        (["config", '{"kv_connector":"PegaConnector","kv_role":"kv_both","kv_connector_extra_config":3}'], "got 3"),
        (["config", '{"connectors": []}'], "0 of them are PegaConnector"),
        (["agent", "/nonexistent.json"], "neither a JSON object nor a readable file"),
        (["agent", '{"listen":'], "not valid JSON"),
        (["doctor", "--listen", "::1:80"], "put the IPv6 address in brackets"),
        (["doctor", "--fast"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_status_2(pega, arguments, said):
    assert said in refused(pega(*arguments))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a model's config.json"),
        (json.dumps({**QWEN3_4B, "num_hidden_layers": "36"}), 'num_hidden_layers: got "36"; allowed: a positive'),
        (json.dumps({**QWEN3_4B, "torch_dtype": "int3"}), "give one of float32, bfloat16"),
    ],
)
def test_bad_models(pega, tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    assert said in refused(pega("explain", "--model", str(tmp_path), "--blocks", "1"))


def test_tp_must_fit_the_heads():
    with pytest.raises(ConfigError, match=r"--tp: got 3; allowed: a divisor or a multiple of the model's 8 KV heads"):
        block_shape(QWEN3_4B, 16, 3, "auto", "vllm")


# --- config ---


def transfer(**changes):
    whole = {
        "kv_connector": "PegaConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "vllm_pega_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_pool_gib": 4},
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def test_config_prints_the_resolved_settings(pega):
    status, out, err = pega("config", '{"host_pool_gib": 4, "load_policy": {"backend": "staged", "chunk_bytes": 4096}}')
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert rows["host_pool_gib"].split() == ["4.0", "given"]
    assert rows["objective"].split() == ["balanced", "default"]
    assert '{"backend": "staged", "chunk_bytes": 4096}' in rows["load_policy"]
    assert "auto (host)" in rows["device_profile"] or "auto (" in rows["device_profile"]


def test_config_takes_a_whole_transfer_config(pega):
    status, out, err = pega("config", json.dumps(transfer()), "--json")
    answer = json.loads(out)
    assert (status, err, answer["warnings"]) == (0, "", [])
    assert answer["config"]["host_pool_gib"] == 4.0
    assert answer["config"]["save_policy"]["backend"] == "auto"


@pytest.mark.parametrize("policy", [None, "fail"])
def test_config_warns_of_failing_requests(pega, policy):
    status, out, err = pega("config", json.dumps(transfer(kv_load_failure_policy=policy)), "--json")
    assert status == 0
    assert 'set it to "recompute"' in err
    assert len(json.loads(out)["warnings"]) == 1


def test_config_inside_a_multi_connector(pega):
    child = transfer(kv_role=None, kv_load_failure_policy=None)
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    multi = transfer(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": [child, other]},
    )
    status, out, err = pega("config", json.dumps(multi), "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["config"]["host_pool_gib"] == 4.0


def test_config_shows_what_the_environment_overrides(pega, monkeypatch):
    monkeypatch.setenv("VLLM_PEGA_OBJECTIVE", "tail")
    _, out, _ = pega("config", '{"objective": "strict"}')
    (row,) = [line for line in out.splitlines() if line.startswith("objective")]
    assert row.split() == ["objective", "tail", "VLLM_PEGA_OBJECTIVE"]
    monkeypatch.setenv("VLLM_PEGA_OBJECTIVE", "none")
    assert 'VLLM_PEGA_OBJECTIVE: got "none"' in refused(pega("config", "{}"))


def test_config_from_a_file_and_standard_input(pega, tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text('{"objective": "tail"}')
    assert json.loads(pega("config", str(file), "--json")[1])["config"]["objective"] == "tail"
    with file.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert json.loads(pega("config", "-", "--json")[1])["config"]["objective"] == "tail"


def test_config_says_every_problem(pega):
    status, _, err = pega("config", '{"objective": "x", "eviction": "y"}')
    assert status == 2
    assert [line.split(": ")[1] for line in err.splitlines()] == ["objective", "eviction"]


def test_config_reads_the_token(pega, tmp_path):
    config = {"migration": {"listen": "[::]:0", "auth_token_file": str(tmp_path / "none")}}
    assert "auth_token_file: cannot read" in refused(pega("config", json.dumps(config)))


# --- the command as a whole ---


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"], ["config", "--help"], ["doctor", "--help"]])
def test_help(pega, arguments):
    status, out, _ = pega(*arguments)
    assert status == 0
    assert out.startswith("usage: pega")


def test_version(pega):
    status, out, _ = pega("--version")
    assert status == 0
    assert out.startswith("pega ")


def test_a_fault_of_ours_is_no_traceback(pega, monkeypatch):
    def broken(*_):
        raise RuntimeError("boom")

    monkeypatch.setattr(cli.cli_config, "load_profile", broken)
    assert pega("config", "{}") == (1, "", "pega config: internal error: RuntimeError: boom\n")


def run_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_no_command_imports_vllm():
    done = run_process(
        "import sys\n"
        "from vllm_pega_connector import cli\n"
        f"cli.main(['explain', *{SEED}, '--profile', 'h200'])\n"
        "cli.main(['config', '{}'])\n"
        "cli.main(['doctor'])\n"
        "sys.exit(bool({'vllm', 'torch'} & set(sys.modules)))"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m vllm_pega_connector.cli explain {' '.join(SEED)} --profile h200 | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
