# SPDX-License-Identifier: Apache-2.0
"""The documentation and the code say the same, in both directions, and every link leads somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")  # the names of the metrics are given to vLLM's classes

from scripts import generate_docs
from vllm_pega_connector import cli
from vllm_pega_connector.cli_config import _unwrap
from vllm_pega_connector.config import MigrationConfig, PegaConfig, PolicyConfig, RequestModel
from vllm_pega_connector.config_text import environment
from vllm_pega_connector.profile import built_in_names
from vllm_pega_connector.prometheus import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(TEXT.values())
KEYS = {key for model in (PegaConfig, PolicyConfig, MigrationConfig, RequestModel) for key in model.model_fields}


def test_generated_regions_are_what_the_code_says() -> None:
    stale = [page.name for page, text, wanted in generate_docs.pages() if text != wanted]
    assert not stale, f"{stale}: run python scripts/generate_docs.py"
    used = set(re.findall(r"<!-- generated: (\w+) -->", EVERYTHING))
    assert used == set(generate_docs.REGIONS)


def test_every_key_is_documented() -> None:
    missing = [key for key in KEYS if f"| `{key}` |" not in EVERYTHING]
    assert not missing


def test_every_key_in_a_table_of_keys_exists() -> None:
    found = []
    for text in TEXT.values():
        for table in re.findall(r"\| key \|.*\n\|[ -|]+\n((?:\|.*\n)+)", text):
            for line in table.splitlines():
                found += re.findall(r"`(\w+)`", line.split("|")[1])
    assert len(found) > 30
    assert not set(found) - KEYS


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", EVERYTHING))
    assert len(named) > 20
    gone = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not gone


def test_every_variable_exists() -> None:
    named = set(re.findall(r"VLLM_PEGA_[A-Z_]+(?![A-Z_<*])", EVERYTHING)) - {"VLLM_PEGA_"}
    assert len(named) > 5
    _, wrong = environment(dict.fromkeys(named, "x"), PegaConfig.model_fields)
    assert not wrong
    assert {f"VLLM_PEGA_{key.upper()}" for key in PegaConfig.model_fields if key != "migration"} <= named


def test_every_metric_exists_and_is_documented() -> None:
    known = {f"vllm:pega_{m.name}" for m in METRICS}
    suffixed = {f"{name}{suffix}" for name in known for suffix in ("", "_sum", "_count", "_bucket")}
    files = [path.read_text() for path in (ROOT / "examples" / "grafana").iterdir() if path.suffix in (".json", ".yml")]
    named = set(re.findall(r"vllm:pega_[a-z_]+", "\n".join([EVERYTHING, *files])))
    assert not {n for n in named if n not in suffixed and not n.endswith("_")}
    assert all(f"| `{name}` |" in EVERYTHING for name in known)


def snippets() -> Iterator[tuple[Path, str]]:
    for page, text in TEXT.items():
        for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
            yield page, block
        for block in re.findall(r"--kv-transfer-config '(\{.*?\})'", text.replace("'$n'", "1"), re.DOTALL):
            yield page, block
    for path in sorted((ROOT / "examples" / "configs").glob("*.json")):
        yield path, path.read_text()


def accepted(given: dict[str, Any]) -> PegaConfig:
    """What `pega config` does with it, the environment aside; warnings count as refusals."""
    extra, warnings = _unwrap(given) if "kv_connector" in given else (given, [])
    assert not warnings
    return PegaConfig.from_extra_config(extra, env={})


def test_every_configuration_shown_is_accepted() -> None:
    seen = list(snippets())
    assert len(seen) > 10
    for page, text in seen:
        if "PegaConnector" not in text and "kv_connector" in text:
            continue  # the other side's
        try:
            accepted(json.loads(text))
        except Exception as error:
            raise AssertionError(f"{page.name}: {text}: {error}") from error


def test_every_pega_command_shown_parses() -> None:
    parser = cli.build_parser()
    seen = 0
    for page, text in TEXT.items():
        commands = re.findall(r"^(?:\w+=\S+ )*pega .*$", text, re.MULTILINE) + re.findall(r"`(pega \w[^`]*)`", text)
        for command in commands:
            words = shlex.split(command, comments=True)
            words = words[words.index("pega") + 1 :]
            if len(words) < 2 and words != ["doctor"]:
                continue  # a command's name
            if "|" in command or "\u2026" in command or "FILE]" in command or "[--" in command:
                continue  # a description, not a command
            seen += 1
            try:
                parser.parse_args(words)
            except SystemExit:
                raise AssertionError(f"{page.name}: {command}") from None
    assert seen > 5


def test_every_link_and_file_leads_somewhere() -> None:
    links = 0
    for page, text in TEXT.items():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target:
                links += 1
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(
            r"`((?:benchmarks|docs|examples|scripts|csrc|tests|vllm_pega_connector)/[\w./-]*)`", text
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{page.name}: {target}"
    assert links > 15


def test_curves_of_every_profile_are_drawn() -> None:
    assert {p.stem.removeprefix("profile-") for p in (ROOT / "docs" / "img").glob("profile-*")} == set(built_in_names())


def test_the_readme_is_short() -> None:
    assert len(TEXT[ROOT / "README.md"].splitlines()) <= 84


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (make docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WARNING -" not in done.stderr and (tmp_path / "operations" / "index.html").exists()
