"""What GPUs tell of themselves: with a stand-in for the driver's library, and where there is none."""

from types import SimpleNamespace

import pynvml
import pytest

from library.runs import gpu_slots, machine

GIB = 2**30
MODERN = {"nvmlDeviceGetName": "NVIDIA RTX 4090", "nvmlDeviceGetPowerUsage": 320500, "nvmlDeviceGetTemperature": 71,
          "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
          "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=int(18.2 * GIB), total=24 * GIB)}  # fmt: skip
FEW = {**MODERN, "nvmlDeviceGetPowerUsage": None, "nvmlDeviceGetTemperature": None,
       "nvmlDeviceGetUtilizationRates": None}  # fmt: skip
SHARED = {**MODERN, "nvmlDeviceGetMemoryInfo": None}  # memory shared with the processor: there is nothing to tell


class Driver:
    """Counts how often it was opened, and answers like a machine with these GPUs; None is what a GPU does not know."""

    def __init__(self, gpus, versions=(1, 2)):
        self.gpus, self.open, self.versions = gpus, 0, versions

    def ask(self, name):
        def answer(handle, version=None, *_):
            new = name == "nvmlDeviceGetMemoryInfo" and version == pynvml.nvmlMemory_v2
            if self.gpus[handle][name] is None or (new and 2 not in self.versions):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self.gpus[handle][name]

        return answer

    def stand_in(self, monkeypatch):
        def add(number):
            self.open += number

        monkeypatch.setattr(pynvml, "nvmlInit", lambda: add(1))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: add(-1))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(self.gpus))
        monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06")
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        for name in MODERN:
            monkeypatch.setattr(pynvml, name, self.ask(name))
        monkeypatch.setattr(gpu_slots, "_count", machine.gpu_count)  # without what an earlier test has kept
        monkeypatch.delenv(gpu_slots.VISIBLE, raising=False)
        return self


@pytest.mark.parametrize("versions", [(1, 2), (1,)], ids=["new driver", "old driver"])
def test_gpus_tell_what_they_know(monkeypatch, versions):
    driver = Driver([MODERN, FEW, SHARED], versions).stand_in(monkeypatch)
    first, second = machine.read_gpus()
    assert first == machine.GpuStatus("0", "NVIDIA RTX 4090", 18.2, 24.0, 97, 71, 320.5)
    assert second == machine.GpuStatus("1", "NVIDIA RTX 4090", 18.2, 24.0)
    assert machine.driver_version() == "580.65.06"
    assert gpu_slots.lanes() == ("0", "1", "2")
    assert driver.open == 0


def test_without_a_driver_there_are_none(monkeypatch):
    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    Driver([MODERN]).stand_in(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert (machine.read_gpus(), machine.driver_version()) == ([], "")
    assert gpu_slots.lanes() == (gpu_slots.CPU,)


def test_the_monitor_looks_on_a_thread_and_known_waits(monkeypatch):
    Driver([MODERN]).stand_in(monkeypatch)
    monitor = machine.GpuMonitor()
    assert [gpu.name for gpu in monitor.known()] == ["NVIDIA RTX 4090"]
    assert monitor.now() == monitor.known()
