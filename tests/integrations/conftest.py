"""One Ray for all tests of the plugin."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of two processors on this machine. Its own notices and progress reports are off."""
    import ray

    os.environ |= {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_MAX_PENDING_TRIALS_PG": "1",
    }
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()
