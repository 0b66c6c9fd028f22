#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds dist/*.tar.gz and from it a manylinux wheel, then tries the wheel as a user would: in an environment that has vLLM
# and no source of ours, from a folder with nothing but the demo.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
bin=$root/.venv/bin
work=$root/build/dist
rm -rf "$work" dist
mkdir -p "$work" dist

# Not isolated: the environment has the build tools, and nothing is fetched.
export PATH="$bin:$PATH" CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-2}
python -m build --no-isolation --sdist --outdir dist .
mkdir "$work/source"
tar -xzf dist/*.tar.gz -C "$work/source" --strip-components 1
python -m build --no-isolation --wheel --outdir "$work/raw" "$work/source"
# The tag says which glibc the wheel needs; libstdc++ is the system's, as manylinux allows.
auditwheel repair --wheel-dir dist "$work"/raw/*.whl
auditwheel show dist/*.whl

# The copy costs no space: hard links. What pip removes there, it unlinks; the original keeps its files.
cp -al "$root/.venv" "$work/venv"
try=$work/venv/bin
# A new file each, for the copy alone, that starts the copy's interpreter.
grep -lIZ -d skip "^#!$bin/python" "$try"/* | xargs -0 sed -i "1s|^#!$bin/|#!$try/|"
"$try/python" -m pip --disable-pip-version-check uninstall -q -y vllm-pega-connector
"$try/python" -m pip --disable-pip-version-check install -q --no-deps --no-index dist/*.whl

mkdir -p "$work/try/examples" "$work/try/tests/support"
cp -r examples/demo "$work/try/examples/"
cp tests/support/tiny_model.py "$work/try/tests/support/"
touch "$work/try/tests/__init__.py" "$work/try/tests/support/__init__.py"
cd "$work/try"
"$try/python" - "$work/venv" <<'PY'
import importlib.metadata, pathlib, sys
import vllm_pega_connector, vllm_pega_connector._native as native
for module in (vllm_pega_connector, native):
    assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
assert not hasattr(native, "FaultDevice"), "a release must not inject faults"
print("installed:", importlib.metadata.version("vllm-pega-connector"), "at", pathlib.Path(native.__file__).parent)
PY
"$try/pega" --version
"$try/pega" explain --ranges 16384 --range-bytes 4KiB --profile h200 >/dev/null
"$try/python" examples/demo/demo.py
rm -rf "$work/venv"
ls -l "$root"/dist
