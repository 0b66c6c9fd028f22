# SPDX-License-Identifier: Apache-2.0
"""What tests of one engine have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of an `engine` nothing is held, and all is forgotten."""
    yield
    if "engine" in request.fixturenames:
        made = request.getfixturevalue("engine")
        made.assert_idle()
        made.forget_all()
