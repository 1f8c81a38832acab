"""setup.sh: which PyTorch it picks, and what it refuses. The installation itself is what CI runs first."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from library.doctor import installation
from tests import source

pytestmark = pytest.mark.skipif(
    os.name == "nt" or shutil.which("bash") is None, reason="setup.sh is for systems with bash"
)


@pytest.fixture
def project(tmp_path):
    """A copy of what setup.sh reads, with an environment that has neither pip nor packages."""
    for name in ("setup.sh", "constraints.txt", "pyproject.toml", "library/doctor/installation.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    return tmp_path


def run(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(project / "setup.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def function(call: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call one function of setup.sh, with `path` in front of PATH."""
    given = {**os.environ, **environment}
    given["PATH"] = f"{path}{os.pathsep}{given['PATH']}" if path else given["PATH"]
    script = f"source '{source.ROOT / 'setup.sh'}'; {call}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=given, check=False)


def install_marker(project: Path, text: str | None = None) -> None:
    if text is None:
        code = [str(project / ".venv/bin/python"), "-P", str(project / "library/doctor/installation.py"), "fingerprint"]
        text = subprocess.run(code, capture_output=True, text=True, check=True).stdout.strip() + " user"
    (project / ".venv/installed.txt").write_text(text + "\n")


def pretend_gpu(folder: Path, line: str) -> Path:
    stub = folder / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\necho '{line}'\n")
    stub.chmod(0o755)
    return folder


def test_it_is_valid_bash():
    assert subprocess.run(["bash", "-n", source.ROOT / "setup.sh"], check=False).returncode == 0


def test_help_and_unknown_commands(project):
    assert "./setup.sh demo" in run(project, "help").stdout
    unknown = run(project, "dome")
    assert unknown.returncode == 1
    assert "no command called dome" in unknown.stderr


@pytest.mark.parametrize(
    ("gpu", "build"),
    [
        ("580.65.06, 9.0, NVIDIA H200", "cu130"),
        ("595.10, 12.0, NVIDIA GeForce RTX 5090", "cu130"),
        ("580.65.06, 6.1, NVIDIA GeForce GTX 1080", "cu126"),  # CUDA 13 has no code for it
        ("535.183.01, 8.9, NVIDIA GeForce RTX 4090", "cu126"),  # the driver has no CUDA 13
    ],
)
def test_the_build_of_torch_fits_gpu_and_driver(tmp_path, gpu, build):
    assert function("torch_build", pretend_gpu(tmp_path, gpu), KOHYA_TORCH="").stdout.strip() == build


@pytest.mark.parametrize("gpu", ["470.199.02, 8.6, NVIDIA RTX A4000", "570.86, 12.0, NVIDIA GeForce RTX 5090"])
def test_a_driver_that_is_too_old_is_said_so(tmp_path, gpu):
    done = function("torch_build", pretend_gpu(tmp_path, gpu), KOHYA_TORCH="")
    assert done.returncode == 1
    assert "Install driver 580 or newer" in done.stderr


def test_a_broken_or_absent_driver_means_no_gpu(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'has failed'\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = function("torch_build", tmp_path, KOHYA_TORCH="")
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert function("torch_build", KOHYA_TORCH="cu126").stdout.strip() == "cu126"


def test_a_wrong_python_is_refused_by_name(tmp_path):
    (tmp_path / "python3.9").write_text("#!/bin/sh\necho 3.9\n")
    (tmp_path / "python3.9").chmod(0o755)
    done = function("find_python", PYTHON=str(tmp_path / "python3.9"))
    assert done.returncode == 1
    assert "not a Python 3.11, 3.12 or 3.13 (it says: 3.9)" in done.stderr
    assert function("find_python", PYTHON=sys.executable).stdout.strip() == sys.executable


def test_nothing_installed_is_said_so(project):
    shutil.rmtree(project / ".venv")
    done = run(project, "gui")
    assert done.returncode == 1
    assert "Nothing is installed yet. Run: ./setup.sh install" in done.stderr


def test_a_half_finished_installation_is_refused_with_the_reason(project):
    (project / ".venv/installing.txt").write_text("PyTorch 2.13.0\n")
    done = run(project, "gui")
    assert done.returncode == 1
    assert "did not finish; it was at: PyTorch 2.13.0" in done.stderr
    assert "./setup.sh install" in done.stderr


def test_an_installation_of_another_version_is_refused(project):
    install_marker(project, "0123456789abcdef user")
    done = run(project, "doctor")
    assert done.returncode == 1
    assert "another version" in done.stderr


def test_another_package_called_library_is_refused(project):
    install_marker(project)
    packages = next((project / ".venv").glob("lib/python*/site-packages"))
    about = packages / "sd_scripts-0.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sd-scripts\nVersion: 0.9\n")
    (about / "top_level.txt").write_text("library\n")
    done = run(project, "gui")
    assert done.returncode == 1
    assert "sd-scripts also brings one called library" in done.stderr
    assert "pip uninstall sd-scripts" in done.stderr


def test_a_library_on_the_path_is_refused(project, tmp_path_factory):
    install_marker(project)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "library").mkdir()
    (elsewhere / "library/__init__.py").write_text("")
    done = run(project, "gui", PYTHONPATH=str(elsewhere))
    assert done.returncode == 1
    assert str(elsewhere) in done.stderr


def test_damaged_packages_are_found(tmp_path, monkeypatch):
    about = tmp_path / "whole-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: whole\nVersion: 1.0\n")
    (about / "RECORD").write_text("whole.py,,\nwhole-1.0.dist-info/METADATA,,\n")
    (tmp_path / "whole.py").write_text("")
    cut = tmp_path / "cut-2.0.dist-info"  # no list of files: pip writes it last
    cut.mkdir()
    (cut / "METADATA").write_text("Metadata-Version: 2.1\nName: cut\nVersion: 2.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(installation.damaged()) == ["cut==2.0"]
    (tmp_path / "whole.py").unlink()
    assert sorted(installation.damaged()) == ["cut==2.0", "whole==1.0"]


def test_every_dependency_is_locked():
    import tomllib

    from packaging.requirements import Requirement

    locked = [
        line.split("==")[0] for line in (source.ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    project = tomllib.loads((source.ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {Requirement(r).name.lower().replace("_", "-") for r in wanted}
    assert names <= set(locked)
    assert len(locked) == len(set(locked))
    assert not [name for name in locked if name.startswith("nvidia") and name != "nvidia-ml-py"]
