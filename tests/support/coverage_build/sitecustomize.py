# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH, makes every process take the native engine from PEGA_NATIVE: the build that counts lines."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec


class CountingNative:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "vllm_pega_connector._native":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["PEGA_NATIVE"])


sys.meta_path.insert(0, CountingNative)  # type: ignore[arg-type]
