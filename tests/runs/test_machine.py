"""What GPUs tell of themselves: with a stand-in for the driver's library, and where there is none."""

import os
import threading
from types import SimpleNamespace

import pynvml
import pytest

from library.runs import gpu_log, gpu_slots, machine

GIB = 2**30
MODERN = {
    "nvmlDeviceGetName": "NVIDIA RTX 4090",
    "nvmlDeviceGetPowerUsage": 320500,
    "nvmlDeviceGetTemperature": 71,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetCudaComputeCapability": (8, 9),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=int(18.2 * GIB), total=24 * GIB),
}
FEW = {
    **MODERN,
    "nvmlDeviceGetPowerUsage": None,
    "nvmlDeviceGetTemperature": None,
    "nvmlDeviceGetUtilizationRates": None,
    "nvmlDeviceGetCudaComputeCapability": None,
}
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

        monkeypatch.setattr(machine, "GPUS", machine.GpuMonitor())  # that of a page beside this must not see these
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: add(1))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: add(-1))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(self.gpus))
        monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06")
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        for name in MODERN:
            monkeypatch.setattr(pynvml, name, self.ask(name))
        monkeypatch.setattr(machine, "gpu_count", machine.gpu_count.__wrapped__)  # without an earlier test's number
        monkeypatch.delenv(gpu_slots.VISIBLE, raising=False)
        return self


@pytest.mark.parametrize("versions", [(1, 2), (1,)], ids=["new driver", "old driver"])
def test_gpus_tell_what_they_know(monkeypatch, versions):
    driver = Driver([MODERN, FEW, SHARED], versions).stand_in(monkeypatch)
    first, second = machine.read_gpus()
    assert first == machine.GpuStatus("0", "NVIDIA RTX 4090", 18.2, 24.0, 97, 71, 320.5, (8, 9))
    assert second == machine.GpuStatus("1", "NVIDIA RTX 4090", 18.2, 24.0)
    assert machine.driver_version() == "580.65.06"
    assert gpu_slots.devices() == ("0", "1", "2")
    assert driver.open == 0


def test_without_a_driver_there_are_none(monkeypatch):
    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    Driver([MODERN]).stand_in(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert (machine.read_gpus(), machine.driver_version()) == ([], "")
    assert gpu_slots.devices() == (gpu_slots.CPU,)


def test_memory_counts_in_gib_and_disks_in_gb_as_systems_show_them(monkeypatch, tmp_path):
    memory = SimpleNamespace(total=64 * GIB, available=16 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    usage = SimpleNamespace(total=2_000 * 10**9, used=1_500 * 10**9, free=500 * 10**9)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    assert machine.computer_memory() == {"used": 48.0, "total": 64.0}
    assert machine.disk_space(tmp_path) == {"free": 500.0, "total": 2000.0}


def test_a_training_notes_its_own_gpus_and_memory_that_spills(monkeypatch):
    Driver([MODERN, FEW, SHARED]).stand_in(monkeypatch)
    noted, said, ended = [], [], threading.Event()
    ended.set()
    record = lambda kind, **data: noted.append((kind, data))  # noqa: E731
    monkeypatch.setenv(gpu_slots.VISIBLE, "1")
    gpu_log.GpuLog(record, said.append, ended).follow()
    assert noted == [("gpu", {"gpus": [{"index": "1", "name": "NVIDIA RTX 4090", "used": 18.2, "total": 24.0}]})]
    noted.clear()
    told = iter(["", "3221225472", "3221225472", "5368709120", "no number", "5368709120", "3221225472"])
    asked = []
    answer = lambda command, **how: asked.append(command[-1]) or SimpleNamespace(stdout=next(told))  # noqa: E731
    monkeypatch.setattr(gpu_log, "IS_WINDOWS", True)
    monkeypatch.setattr(gpu_log, "subprocess", SimpleNamespace(run=answer, SubprocessError=OSError))
    log = gpu_log.GpuLog(record, said.append, ended)
    for used in (18, 18, 23, 23, 23, 23, 18):
        monkeypatch.setitem(FEW, "nvmlDeviceGetMemoryInfo", SimpleNamespace(used=used * GIB, total=24 * GIB))
        log.look()
        log._samples += gpu_log.SHARED_EVERY
    assert [data.get("spilled", 0) for _, data in noted] == [0, 0, 0, 2, 2, 2, 0]
    assert len(said) == 1 and "2.0 GiB of this training are in CPU memory" in said[0]
    assert f"pid[_]{os.getpid()}[_]%" in asked[0]


def test_without_a_gpu_a_training_looks_for_one_once(monkeypatch):
    monkeypatch.setenv(gpu_slots.VISIBLE, "")
    assert not gpu_log.GpuLog(None, None, threading.Event()).look()


def test_of_free_gpus_the_one_with_most_free_memory_is_taken(monkeypatch):
    small = {**MODERN, "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 * GIB, total=24 * GIB)}
    Driver([small, MODERN, {**MODERN, "nvmlDeviceGetMemoryInfo": None}]).stand_in(monkeypatch)
    assert gpu_slots.choose_devices({}, ("0", "1", "2")) == ("1",)
    assert gpu_slots.choose_devices({"num_processes": 2}, ("0", "1", "2")) == ("0", "1")
    assert gpu_slots.choose_devices({}, ("0", "2")) == ("0",) and gpu_slots.choose_devices({}, ("2",)) == ("2",)


def test_the_monitor_looks_on_a_thread_and_known_waits(monkeypatch):
    Driver([MODERN]).stand_in(monkeypatch)
    monitor = machine.GpuMonitor()
    assert [gpu.name for gpu in monitor.known()] == ["NVIDIA RTX 4090"]
    assert monitor.now() == monitor.known()
