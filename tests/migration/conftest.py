# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM instances for all tests that want them. Imported late: vLLM and Mooncake may not be there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.migration.instance import VllmInstance
    from tests.serving.engine import Engine


@pytest.fixture(scope="package")
def source() -> Iterator[VllmInstance]:
    from tests.migration.instance import VllmInstance
    from tests.migration.vllm_pair import OPTIONS, config

    made = VllmInstance(config(), **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="package")
def target(source: VllmInstance) -> Iterator[Engine]:
    from tests.migration.vllm_pair import started_target

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_pega_connector.migration.client.LAST_RESTART_S", 0.5)  # these tests end many agents
        yield from started_target(source)


@pytest.fixture
def quiet(target: Engine) -> Iterator[None]:
    from tests.migration.vllm_pair import results

    yield
    migration = target.connector._scheduler._migration
    deadline = time.monotonic() + 60
    while migration.counts()["pulls"] or migration.counts()["quarantined"]:
        if migration.counts()["quarantined"] and not migration.counts()["pulls"]:
            migration._client.kill()  # as the connector itself does after a minute
        migration.poll()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    target.assert_idle()
    target.forget_all()
    results(target)
