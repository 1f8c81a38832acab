"""What the doctor says of a machine, and what it makes of it."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

import library.doctor
from library.cli import main, train_script
from library.config import environment
from library.doctor import disk, hardware
from library.doctor import report as doctor
from library.families import config_class
from library.setup import installation
from tests.training import PLAIN_CODE

READY = [
    "--pretrained_model_name_or_path=x",
    "--train_data_dir=x",
    "--output_dir=x",
    "--clip_l=x",
    "--t5xxl=x",
    "--ae=x",
]


def test_a_healthy_report_is_text_and_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine_machine", lambda quick: iter([doctor.ok("torch", "2.13", version="2.13")]))
    assert doctor.main([]) == 0
    assert "This machine can train" in capsys.readouterr().out
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert report["findings"] == [{"topic": "torch", "verdict": "ok", "text": "2.13", "data": {"version": "2.13"}}]


def test_only_what_keeps_a_training_from_running_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine_machine", lambda quick: iter([doctor.hint("gpu", "none found")]))
    assert doctor.main(["--quick"]) == 0
    monkeypatch.setattr(doctor, "examine_machine", lambda quick: iter([doctor.bad("packages", "missing: torch")]))
    assert doctor.main(["--quick"]) == 1
    assert "Fix what is marked" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    def broken():
        raise OSError("no such device")

    monkeypatch.setattr(hardware, "check_torch_build", broken)
    findings = {finding.topic: finding for finding in doctor.examine_machine(quick=True)}
    assert findings["broken"].verdict == "bad"
    assert "no such device" in str(findings["broken"].text)
    assert "disk" in findings


def test_a_torch_that_cannot_be_loaded_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "library.doctor.hardware", None)
    monkeypatch.delattr(library.doctor, "hardware")
    *_, last = doctor.examine_machine(quick=True)
    assert last.topic == "torch" and last.verdict == "bad" and f"{installation.SETUP} install" in str(last.text)


def test_this_machine_is_described():
    topics = [finding.topic for finding in doctor.examine_machine(quick=True)]
    assert {"system", "packages", "torch", "gpu", "compiler", "disk", "folders", "page"} <= set(topics)


def test_another_version_than_the_tested_one_is_a_hint(monkeypatch):
    monkeypatch.setattr(doctor, "locked_versions", lambda: {"numpy": "0.1"})
    assert doctor.check_packages().verdict == "hint"
    assert "tested: 0.1" in str(doctor.check_packages().text)
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    assert doctor.check_packages().verdict == "bad"


@pytest.mark.slow
def test_compiling_is_really_tried(monkeypatch):
    for name, value in PLAIN_CODE.items():
        monkeypatch.setenv(name, value)
    finding = hardware.compile_on("cpu")
    if finding.verdict == "hint":
        pytest.skip(f"no working compiler here: {finding.text}")
    assert finding.data["works"] is True


def test_a_compiler_that_fails_is_a_hint_with_its_reason(monkeypatch):
    import torch

    def fails(*_, **__):
        raise RuntimeError("backend='inductor' raised:\nsome context\nfatal error: Python.h: No such file")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(hardware, "_compile_obstacle", lambda device: "")  # such as no compiler here
    finding = hardware.compile_on("cpu")
    assert finding.verdict == "hint"
    assert "fatal error: Python.h: No such file" in str(finding.text)


def test_what_switches_compiling_off_is_named(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    finding = hardware.compile_on("cpu")
    assert finding.verdict == "hint" and "TORCHDYNAMO_DISABLE in the environment" in str(finding.text)


def test_without_a_compiler_it_says_which(monkeypatch):
    from torch._inductor import cpp_builder

    def none():
        raise RuntimeError("nothing")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert "no C++ compiler was found" in str(hardware.compile_on("cpu").text)


def test_unwritable_cache_and_full_disk_are_reported(monkeypatch, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(environment.CACHE, str(file / "cache"))
    finding = doctor.check_environment()
    assert finding.verdict == "bad" and f"{environment.CACHE}: {file / 'cache'} cannot be created" in str(finding.text)
    monkeypatch.setenv(environment.CACHE, str(file / "cache"))
    assert main.main(["bench", "--family", "flux", "--device", "cpu"]) == 1
    assert "choose another folder, or unset the variable" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1"):
        train_script.main(config_class("flux_train"), READY)
    assert "TORCHINDUCTOR_CACHE_DIR" in capsys.readouterr().err
    monkeypatch.delenv(environment.CACHE)
    assert doctor.check_environment().verdict == "ok"  # the rest of the report continues without

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", full)
    assert "cannot be written (No space left on device)" in str(disk.check_folders().text)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=2e8))
    assert disk.check_disk().verdict == "bad" and "nothing can be saved" in str(disk.check_disk().text)


def test_proxies_and_certificates_that_cannot_be_used_are_named_without_their_values(monkeypatch):
    for name in [name for name in os.environ if name.lower() in environment.NETWORK_VARIABLES]:
        monkeypatch.delenv(name)
    assert doctor.network().text == ""
    wrong = {
        "HTTPS_PROXY": "http://user:hidden-word@proxy:port",
        "no_proxy": "localhost,::1/128",
        "SSL_CERT_FILE": "/nowhere/ca.pem",
    }
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    findings = doctor.network()
    text = str(findings.text).casefold()  # on Windows names of the environment are in upper case
    assert findings.verdict == "hint" and all(name.casefold() in text for name in wrong)
    assert "http_proxy" not in text and "hidden-word" not in text
    assert all(os.environ[name] == value for name, value in wrong.items())
