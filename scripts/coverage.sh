#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Which lines run, of Python (coverage.py, child processes included) and of csrc/ (gcov, in a build of its own).
#
#   scripts/coverage.sh build          builds csrc/ with counters into build/coverage
#   scripts/coverage.sh run ARGS...    python -m ARGS, counted; adds to what was counted before
#   scripts/coverage.sh clear          forgets what was counted
#   scripts/coverage.sh report         prints what is not covered
#   scripts/coverage.sh totals MIN     one line; fails below MIN percent in either language
set -euo pipefail
cd "$(dirname "$0")/.."

BUILD=build/coverage
DATA=.cache/coverage
PYTHON=.venv/bin/python
PATH="$PWD/.venv/bin:$PATH"

build() {
  # Whole folders as one unit: the bindings' headers take longer than the code.
  cmake -S . -B $BUILD -G Ninja -DPEGA_COVERAGE=ON -DPEGA_FAULTS=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_UNITY_BUILD_BATCH_SIZE=12 -DPython_EXECUTABLE="$PWD/$PYTHON" >$BUILD.log 2>&1 &&
    cmake --build $BUILD -j2 >>$BUILD.log 2>&1 || { tail -n 30 $BUILD.log; exit 1; }
}

run() {
  PEGA_NATIVE=$(echo "$PWD/$BUILD"/_native*.so)
  export PEGA_NATIVE PYTHONPATH="$PWD/tests/support/coverage_build${PYTHONPATH:+:$PYTHONPATH}"
  $PYTHON -m coverage run -m "$@"
}

clear() {
  rm -rf $DATA
  mkdir -p $DATA
  find $BUILD -name '*.gcda' -delete
}

# The fake driver and the simulated device are tools of the tests; cuda_driver looks the real one up, on a GPU alone.
native() {
  gcovr --root . --filter 'csrc/' --exclude 'csrc/(fake_driver|sim_device|cuda_driver)' --exclude-throw-branches "$@" $BUILD
}

report() {
  $PYTHON -m coverage combine --keep --quiet
  $PYTHON -m coverage report
  native
}

totals() {
  local minimum=$1 python native
  $PYTHON -m coverage combine --keep --quiet
  python=$($PYTHON -m coverage report --format=total)
  native=$(native | awk '$1 == "TOTAL" {print $4}' | tr -d %)
  echo "Lines that the tests ran: Python $python %, C++ $native % (at least $minimum %; make coverage lists the others)"
  [ "$python" -ge "$minimum" ] && [ "$native" -ge "$minimum" ]
}

mkdir -p build .cache/coverage
"$@"
