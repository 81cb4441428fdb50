"""One Ray for all tests of the plugin."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests import warm_ray
from tests.doubles import PretendedGpuProbe

_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
}


@pytest.fixture(scope="session")
def ray_on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of one processor, whose workers are forked where PyTorch is imported. Whatever cluster runs beside it."""
    import ray

    with pytest.MonkeyPatch.context() as environment:  # for Ray's processes, which inherit it
        for name, value in _QUIET.items():
            environment.setenv(name, value)
        server = warm_ray.begin(tmp_path_factory.mktemp("ray"), environment)
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()
    server.communicate()


@pytest.fixture
def local_ray(ray_on_this_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That Ray, without Tune's notices, progress reports and files of results."""
    for name, value in _QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process trains on its processor counts as trained on the GPU that a guard names."""
    monkeypatch.setattr("perfguard.measure.run.GpuProbe", PretendedGpuProbe)
