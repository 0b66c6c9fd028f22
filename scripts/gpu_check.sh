#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and measures on a GPU machine, with that machine's python3 (PyTorch or not; CuPy, nanobind, pytest,
# hypothesis and pydantic needed). Results go to the folder given, or ./gpu-results. A failing step stops nothing.
set -u
out=${1:-gpu-results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0
step() {
  local name=$1 start=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "FAILED $name:"; tail -n 25 "$out/$name.log"; }
  echo "$name: $((SECONDS - start)) s; $(tail -n 1 "$out/$name.log")"
}
build() {
  cmake -S . -B build/gpu -G Ninja -DPython_EXECUTABLE="$(command -v python3)" &&
    cmake --build build/gpu && cp build/gpu/_native*.so vllm_pega_connector/
}
step build build
step tests python3 -m pytest -q -p no:cacheprovider tests/gpu tests/native/test_fake_driver.py
step memcheck compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider tests/gpu/test_kernels.py \
  -k "alignments or staged_runs or random_sizes"
step transfer python3 benchmarks/transfer.py --json "$out/transfer.json" --plot "$out/transfer.png" ${TRANSFER_ARGS:-}
step launch_delay python3 benchmarks/launch_delay.py --json "$out/launch_delay.json"
exit $failed
