"""What befalls a card while something else is measured on it: on a GPU that lives in memory."""

from __future__ import annotations

import pytest

from perfguard_research.collect.health import CardHealth, DriverWindow, Signs, Trouble, is_busy, trouble_between
from tests.fake_gpu import NO_PERMISSION, NOT_SUPPORTED, PID, FakeCuda, FakeGpu, FakeNvml, MiB


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(initialized=True, utilisation=0)


@pytest.fixture
def nvml(gpu: FakeGpu) -> FakeNvml:
    return FakeNvml(gpu)


def health_of(nvml: FakeNvml) -> CardHealth:
    return CardHealth(nvml.gpu.uuid, nvml=nvml)


def test_a_quiet_card_shows_nothing(gpu: FakeGpu, nvml: FakeNvml) -> None:
    health = health_of(nvml)
    before, after = health.look(PID), health.look(PID)
    assert health.is_readable
    assert trouble_between(before, after) == Trouble()
    assert not is_busy(after)
    health.close()
    assert nvml.sessions == 0


def test_other_processes_spoil_times_and_no_more(gpu: FakeGpu, nvml: FakeNvml) -> None:
    health = health_of(nvml)
    before = health.look(PID)
    gpu.others = {7: 900 * MiB}
    trouble = trouble_between(before, health.look(PID))
    assert trouble.words == ("other processes on the GPU: 7",)
    assert (trouble.spoils_time, trouble.spoils_all, trouble.fatal) == (True, False, False)
    assert is_busy(health.look(PID))


def test_one_stranger_in_other_pid_namespace_is_ours(gpu: FakeGpu, nvml: FakeNvml) -> None:
    gpu.own_pid = 1
    health = health_of(nvml)
    assert health.look(PID).others == ()
    gpu.others = {7: MiB}
    assert len(health.look(PID).others or ()) == 1


def test_ecc_errors_and_xids_spoil_all_of_their_run(gpu: FakeGpu, nvml: FakeNvml) -> None:
    gpu.memory_errors = 5  # of before our time
    health = health_of(nvml)
    first = health.look(PID)
    gpu.memory_errors, gpu.xids = 7, [31, 43]
    second = health.look(PID)
    trouble = trouble_between(first, second)
    assert trouble.words == ("2 uncorrected memory errors (ECC)", "Xid 31, 43")
    assert trouble.spoils_all
    assert not trouble.fatal
    assert trouble_between(second, health.look(PID)) == Trouble()


def test_a_lost_card_is_the_end(gpu: FakeGpu, nvml: FakeNvml) -> None:
    health = health_of(nvml)
    before = health.look(PID)
    gpu.lost = True
    trouble = trouble_between(before, health.look(PID))
    assert trouble == Trouble(("the GPU was lost",), True, True, True)
    health.close()


def test_what_the_driver_refuses_is_left_out(gpu: FakeGpu, nvml: FakeNvml) -> None:
    nvml.refusals = {"nvmlDeviceGetTotalEccErrors": NOT_SUPPORTED, "nvmlEventSetCreate": NO_PERMISSION}
    assert health_of(nvml).look(PID) == Signs(others=(), memory_errors=None, utilisation=0.0)


def test_health_without_nvml_knows_nothing(nvml: FakeNvml) -> None:
    """Nothing is raised."""
    nvml.refusals = {"nvmlInit": NO_PERMISSION}
    health = health_of(nvml)
    assert not health.is_readable
    assert health.look(PID) == Signs()
    health.close()
    assert not CardHealth("another", nvml=FakeNvml(FakeGpu())).is_readable


def test_unseen_work_shows_as_utilisation(gpu: FakeGpu, nvml: FakeNvml) -> None:
    gpu.utilisation = 60
    assert is_busy(health_of(nvml).look(PID))


def test_a_window_tells_the_energy_between_its_ends(gpu: FakeGpu, nvml: FakeNvml) -> None:
    window = DriverWindow(cuda=FakeCuda(gpu), nvml=nvml, interval_s=3600.0)
    gpu.energy_mj += 9000  # before it
    window.start()
    gpu.energy_mj += 2500
    reading = window.finish()
    assert reading.energy_j == 2.5
    assert reading.sm_clock_hz == 1.4e9
