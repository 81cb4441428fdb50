"""Detection, with an NVML that lives in memory, and with the real one where there is one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from perfguard.devices import catalog, cpu, detect, detect_gpu, resolve_device
from perfguard.exceptions import ConfigurationError, MeasuringError
from tests.fake_gpu import NOT_SUPPORTED, UNINITIALIZED, FakeNvmlError


def card(name: str | bytes, memory_mib: int, uuid: str = "GPU-1", **figures: Any) -> dict[str, Any]:
    """What NVML answers of a card, by the names of its functions."""
    return {"UUID": uuid, "Name": name, "MemoryInfo": SimpleNamespace(total=memory_mib * 2**20), **figures}


class FakeNvml:
    """Holds cards; a figure that a card lacks is answered with an error, as NVML does."""

    NVMLError, NVML_CLOCK_SM, NVML_CLOCK_MEM = FakeNvmlError, 1, 2

    def __init__(self, *cards: dict[str, Any], installed: bool = True) -> None:
        self.cards, self.installed = cards, installed

    def nvmlInit(self) -> None:
        if not self.installed:
            raise FakeNvmlError(UNINITIALIZED)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return _found(dict(enumerate(self.cards)), index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return _found({card["UUID"]: card for card in self.cards}, uuid)

    def nvmlDeviceGetMaxClockInfo(self, handle: dict[str, Any], clock: int) -> Any:
        return _found(_found(handle, "MaxClockInfo"), clock)

    def __getattr__(self, name: str) -> Any:
        return lambda handle: _found(handle, name.removeprefix("nvmlDeviceGet"))


def _found(figures: Mapping[Any, Any], name: Any) -> Any:
    if name not in figures:
        raise FakeNvmlError(NOT_SUPPORTED)
    return figures[name]


T4 = card("Tesla T4", 15360, uuid="GPU-t4")
A100 = card("NVIDIA A100-PCIE-40GB", 40960, uuid="GPU-a100")
UNKNOWN = card(
    "NVIDIA GeForce RTX 3080 Next", 10240, CudaComputeCapability=(8, 6), NumGpuCores=8704, MaxClockInfo={1: 2100, 2: 9501},
    MemoryBusWidth=320, PowerManagementDefaultLimit=320_000,
)  # fmt: skip


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("name", "memory_mib", "id_"),
    [
        ("Tesla T4", 15360, "t4"),
        (b"Tesla T4", 16160, "t4"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx3080"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx3080-12gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx4060ti-16gb"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 6144, "rtx3060-laptop"),
        ("A100-PCIE-40GB", 40536, "a100-pcie-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie-80gb"),
        ("NVIDIA B200", 183359, "b200-sxm-180gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtxpro6000maxq"),
    ],
)
def test_detect_gpu_recognises_catalog_cards(name: str | bytes, memory_mib: int, id_: str) -> None:
    assert detect_gpu(nvml=FakeNvml(card(name, memory_mib))) is catalog()[id_]


def test_detect_gpu_describes_unknown_card_from_nvml() -> None:
    """It is never described as faster than it is."""
    found = detect_gpu(nvml=FakeNvml(UNKNOWN))
    assert found is not None
    assert (found.id, found.name, found.kind) == ("nvidia-geforce-rtx-3080-next", "NVIDIA GeForce RTX 3080 Next", "cuda")
    assert (found.num_sms, found.tdp_w, found.architecture) == (68, 320.0, "compute 8.6")
    assert found.bandwidth_bytes_per_s == pytest.approx(760e9, rel=1e-3)
    assert 9.5 * 2**30 < found.memory_bytes < 10 * 2**30
    data_sheet = {"fp32": 29.8e12, "tf32": 29.8e12, "fp16": 59.5e12, "bf16": 59.5e12}
    assert set(found.peak_flops) == set(data_sheet)
    assert all(0.8 * rate < found.peak_flops[name] <= 1.05 * rate for name, rate in data_sheet.items())
    assert "not in the catalog" in found.source


@pytest.mark.parametrize(("capability", "rates"), [((6, 1), {"fp32"}), ((7, 5), {"fp32", "fp16"})])
def test_detect_gpu_unknown_card_lacks_newer_rates(capability: tuple[int, int], rates: set[str]) -> None:
    """It has no rate that its generation lacks."""
    found = detect_gpu(nvml=FakeNvml(card("GeForce GTX 1600", 6144, CudaComputeCapability=capability, NumGpuCores=1408)))
    assert found is not None
    assert set(found.peak_flops) == rates


def test_no_nvml_no_driver_and_no_gpu_are_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_gpu(nvml=FakeNvml(installed=False)) is None
    assert detect_gpu(nvml=FakeNvml()) is None
    assert detect_gpu(1, nvml=FakeNvml(T4)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect_gpu() is None


def test_a_name_is_looked_up_without_asking_nvml() -> None:
    assert resolve_device("a100", nvml=FakeNvml(installed=False)) is catalog()["a100-pcie-40gb"]
    with pytest.raises(ConfigurationError, match="Did you mean 'a100'"):
        resolve_device("a1000")


@pytest.mark.parametrize("gpu", [None, 0, 3090, ["a100"], b"a100"])
def test_anything_but_a_text_or_a_device_is_refused(gpu: Any) -> None:
    with pytest.raises(ConfigurationError, match='gpu must be a text such as "a100"'):
        resolve_device(gpu)


@pytest.mark.parametrize(
    ("gpu", "id_"),
    [
        ("a100", "a100-sxm-80gb"),
        ("A100 80GB", "a100-sxm-80gb"),
        ("a100-40gb", "a100-pcie-40gb"),
        ("a100-pcie-40gb", "a100-pcie-40gb"),
        ("h100", "h100-sxm-80gb"),
        ("rtx3090", "rtx3090"),
    ],
)
def test_a_short_name_means_the_variant_that_is_here(gpu: str, id_: str) -> None:
    """Readings count only for the device that gave them: whoever writes "a100" beside an A100 SXM means that card."""
    here = card("NVIDIA A100-SXM4-80GB", 81920)
    assert resolve_device(gpu, nvml=FakeNvml(here)).id == id_


def test_cpu_and_auto_without_a_gpu_are_this_processor() -> None:
    assert resolve_device("cpu", nvml=FakeNvml(T4)) is cpu()
    assert resolve_device(" CPU ") is cpu()
    assert resolve_device("auto", nvml=FakeNvml()) is cpu()


@pytest.mark.parametrize(
    ("visible", "id_"),
    [
        (None, "t4"),
        ("0", "t4"),
        ("1", "a100-pcie-40gb"),
        (" 1 ,0", "a100-pcie-40gb"),
        ("GPU-a100", "a100-pcie-40gb"),
        ("", "cpu"),
        ("7", "cpu"),
    ],
)
def test_auto_is_first_visible_gpu(visible: str | None, id_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve_device("auto", nvml=FakeNvml(T4, A100)).id == id_


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "visible_gpu", lambda **_: None)
    with pytest.raises(MeasuringError, match=r"--gpu t4 is the .*T4, but this machine has the .*\. Use --gpu auto\."):
        detect.device_here("t4")
    assert detect.device_here("auto") is detect.device_here("cpu") is cpu()
    monkeypatch.setattr(detect, "visible_gpu", lambda **_: catalog()["t4"])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(MeasuringError, match=r"There is a .*T4, but this PyTorch \(.*\) has no CUDA"):
        detect.device_here("auto")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert detect.device_here("auto") == catalog()["t4"]


# --- the processor


def test_the_measured_rates_are_those_of_a_processor() -> None:
    device = cpu()
    assert 1e8 < device.peak_flops["fp32"] < 1e14
    assert 1e8 < device.bandwidth_bytes_per_s < 2e12
    assert device.num_sms == torch.get_num_threads()
    assert 0 < device.memory_bytes <= psutil.virtual_memory().total


def test_cpu_measurement_keeps_random_state() -> None:
    state = torch.random.get_rng_state()
    cpu.cache_clear()
    cpu()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_cpu_is_measured_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def looked_at(call: Callable[[], torch.Tensor]) -> float:
        seen.append(call().dtype)
        return 1.0

    monkeypatch.setattr(detect, "_best_time", looked_at)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cpu.__wrapped__()
    assert seen == [torch.float32, torch.float32]
