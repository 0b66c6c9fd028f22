# SPDX-License-Identifier: Apache-2.0
"""Skips where there is no GPU or no CuPy; otherwise a device with the compiled kernels."""

from __future__ import annotations

import pytest

from vllm_pega_connector import _native

WHY_NOT = _native.cuda_available()


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {WHY_NOT}"))


@pytest.fixture(scope="session")
def cubin() -> bytes:
    from vllm_pega_connector import kernels

    return kernels.compile_cubin(0)
