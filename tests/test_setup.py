"""The set-up: which PyTorch it picks, what it refuses, and that uv is told what pip is.

The installation itself is what CI runs first.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from library.cli import main as cli
from library.setup import installation, installer, locked_packages
from tests import source

pytestmark = pytest.mark.skipif(
    os.name == "nt" or shutil.which("bash") is None, reason="setup.sh is for systems with bash"
)
INSTALLER = (
    "__init__.py",
    "setup/__init__.py",
    "setup/installation.py",
    "setup/installer.py",
    "setup/locked_packages.py",
    "config/__init__.py",
    "config/json_types.py",
    "config/problems.py",
)


@pytest.fixture
def project(tmp_path):
    """A copy of what setup.sh reads, with an environment that has neither pip nor packages."""
    for name in ("setup.sh", *installation.LOCKED, *(f"library/{name}" for name in INSTALLER)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    return tmp_path


FIND_UV = locked_packages.find_uv


def run(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(project / "setup.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def function(call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call one function of setup.sh."""
    inherited = {**os.environ, **environment}
    script = f"source '{source.ROOT / 'setup.sh'}'; {call}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=inherited, check=False)


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """A folder in front of PATH, and no word about which PyTorch is wanted."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("KOHYA_TORCH", raising=False)
    return tmp_path


def install_marker(project: Path, text: str | None = None) -> None:
    if text is None:
        code = "from library.setup import installation; print(installation.fingerprint_installation(), 'user')"
        line = [str(project / ".venv/bin/python"), "-c", code]
        text = subprocess.run(line, cwd=project, capture_output=True, text=True, check=True).stdout.strip()
    (project / ".venv/installed.txt").write_text(text + "\n")


def pretend_gpu(folder: Path, line: str) -> None:
    stub = folder / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\necho '{line}'\n")
    stub.chmod(0o755)


def test_setup_sh_is_valid_bash():
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
def test_the_build_of_torch_fits_gpu_and_driver(on_path, gpu, build):
    pretend_gpu(on_path, gpu)
    assert installer.choose_torch_build() == build


@pytest.mark.parametrize("gpu", ["470.199.02, 8.6, NVIDIA RTX A4000", "570.86, 12.0, NVIDIA GeForce RTX 5090"])
def test_a_driver_that_is_too_old_is_reported(on_path, gpu):
    pretend_gpu(on_path, gpu)
    with pytest.raises(installer.Refusal, match="Install driver 580 or newer"):
        installer.choose_torch_build()


def test_a_broken_or_absent_driver_means_no_gpu(on_path, monkeypatch):
    (on_path / "nvidia-smi").write_text("#!/bin/sh\necho 'has failed'\nexit 9\n")
    (on_path / "nvidia-smi").chmod(0o755)
    assert installer.choose_torch_build() == ""
    monkeypatch.setenv("KOHYA_TORCH", "cu126")
    assert installer.choose_torch_build() == "cu126"


def test_uv_gets_the_settings_of_pip(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_CERT"))]:
        monkeypatch.delenv(name)
    own, lock = tmp_path / "pip.conf", tmp_path / "lock.txt"
    lock.write_text("numpy<9\n")
    own.write_text(
        f"[global]\nindex-url = https://user:pass@mirror.example/simple\nfind-links = {tmp_path} {lock.parent}/more\n"
        f"extra-index-url =\n    https://one.example/simple\n    https://two.example/simple\nconstraint = {lock}\n"
        "[install]\ntimeout = 44\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(own))
    monkeypatch.setenv("PIP_CERT", "/etc/own.pem")
    monkeypatch.setenv("PIP_TIMEOUT", "55")
    monkeypatch.setenv("UV_INDEX", "https://wanted.example/simple")
    variables, arguments = locked_packages.uv_settings(locked_packages.settings_of_pip())
    assert variables["UV_DEFAULT_INDEX"] == "https://user:pass@mirror.example/simple"
    assert variables["UV_FIND_LINKS"] == f"{tmp_path},{tmp_path}/more"
    assert variables["UV_INDEX"] == "https://wanted.example/simple"  # what uv was told itself stays
    assert (variables["SSL_CERT_FILE"], variables["UV_HTTP_TIMEOUT"]) == ("/etc/own.pem", "55")
    assert "UV_INDEX_STRATEGY" not in variables  # the best of all indexes only counts where hashes decide
    assert arguments == ["-c", str(lock), "--no-index"]


@pytest.mark.parametrize("variable", ["OneDrive", "OneDriveConsumer", "OneDriveCommercial"])
def test_packages_are_copied_into_folders_of_onedrive(tmp_path, monkeypatch, capsys, variable):
    """It refuses the hard links that uv makes."""
    for name in ("OneDrive", "OneDriveConsumer", "OneDriveCommercial", "UV_LINK_MODE"):
        monkeypatch.delenv(name, raising=False)
    for module in (locked_packages, installer):
        monkeypatch.setattr(module, "WINDOWS", True)
        monkeypatch.setattr(module, "PROJECT_ROOT", tmp_path / "OneDrive" / "kohya")
    for folder, is_in in (("OneDrive", True), ("OneDrive - work", False), ("", False)):
        monkeypatch.setenv(variable, str(tmp_path / folder) if folder else "")
        assert ("UV_LINK_MODE" in locked_packages.uv_settings({})[0]) == is_in
        installer.advise()
        assert ("is in OneDrive" in capsys.readouterr().out) == is_in
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("UV_LINK_MODE", "symlink")
    assert locked_packages.uv_settings({})[0]["UV_LINK_MODE"] == "symlink"


@pytest.fixture
def asked(monkeypatch):
    """What uv and pip were asked for, of an environment without PyTorch; nothing is installed."""
    lines = []

    def run(line, env=None, **_):
        lines.append(([str(word) for word in line], env or {}))
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(
        locked_packages, "settings_of_pip", lambda: {"extra-index-url": ["https://more.example/simple"]}
    )
    monkeypatch.setattr(locked_packages.installation, "damaged", lambda: iter(()))
    monkeypatch.setattr(locked_packages, "has_torch", lambda build: False)
    monkeypatch.setattr(locked_packages, "find_uv", lambda: "uv")
    monkeypatch.setattr(locked_packages.subprocess, "run", run)
    return lines


@pytest.mark.parametrize("by", ["uv", "pip"])
def test_all_but_torch_has_hashes_and_torch_has_an_index_of_its_own(asked, monkeypatch, by):
    if by == "pip":
        monkeypatch.setattr(locked_packages, "find_uv", lambda: "")
    installer.install_packages("cu130", "dev")
    *hashed, (torch, _), (itself, _) = asked
    files = [Path(line[line.index("-r") + 1]).name for line, _ in hashed]
    assert files == ["build.txt", "user.txt", "dev.txt"]
    assert all({"--require-hashes", "--no-deps", "--no-build-isolation"} <= set(line) for line, _ in hashed)
    place = "https://download.pytorch.org/whl/cu130"
    assert not any(place in line for line, _ in (*hashed, asked[-1])) and torch[-1] == "torch==2.13.0+cu130"
    assert torch[torch.index(place) - 1] == ("--default-index" if by == "uv" else "--index-url")
    assert itself[-4:] == ["--no-deps", "--no-build-isolation", "-e", "."]
    if by == "uv":
        strategies = [env.get("UV_INDEX_STRATEGY") for _, env in asked]
        assert strategies == ["unsafe-best-match"] * 3 + [None] * 2
        assert "UV_INDEX" in asked[0][1] and "UV_INDEX" not in asked[3][1]


def test_what_is_damaged_is_installed_again_with_its_hashes(asked, monkeypatch, tmp_path):
    broken = ["numpy==2.4.6", "Nvidia-cublas-cu13==1.0", "xformers==0.1"]
    monkeypatch.setattr(locked_packages.installation, "damaged", lambda: iter(broken))
    monkeypatch.setattr(locked_packages, "BROUGHT", re.compile(locked_packages.BROUGHT.pattern, re.I))
    monkeypatch.setattr(locked_packages, "has_torch", lambda build: True)
    monkeypatch.setattr(locked_packages, "ENVIRONMENT", tmp_path)
    installer.install_packages("cu130", "user")
    lines = [line for line, _ in asked]
    (again,) = [line for line in lines if "--require-hashes" in line and "--reinstall" in line]
    assert again[-1] == str(tmp_path / "again.txt")
    (block,) = locked_packages.split_lock((tmp_path / "again.txt").read_text())
    assert block.startswith("numpy==2.4.6") and block.count("--hash=sha256:") > 3
    (brought,) = [line for line in lines if broken[1] in line]
    (own,) = [line for line in lines if broken[2] in line]
    assert "https://download.pytorch.org/whl/cu130" in brought and "https://download.pytorch.org/whl/cu130" not in own


@pytest.mark.parametrize("why", ["cannot be had", "did not install everything"])
def test_pip_installs_where_uv_does_not(asked, monkeypatch, capsys, why):
    run = locked_packages.subprocess.run

    def without_uv(line, **more):
        if line[0] == "uv" and why == "cannot be had":
            raise FileNotFoundError("uv")
        return subprocess.CompletedProcess(line, 1) if line[0] == "uv" else run(line, **more)

    if why == "cannot be had":
        monkeypatch.setattr(locked_packages, "ENVIRONMENT", Path("/nowhere"))
        monkeypatch.setattr(locked_packages.shutil, "which", lambda name: None)
        monkeypatch.setattr(locked_packages, "find_uv", FIND_UV)
    monkeypatch.setattr(locked_packages.subprocess, "run", without_uv)
    assert installer.install_packages("cu130", "dev") == ""
    assert why in capsys.readouterr().out
    with_pip = [line for line, _ in asked if line[1:4] == ["-m", "pip", "install"]]
    assert [line[-1] for line in with_pip][-2:] == ["torch==2.13.0+cu130", "."]


def test_a_wrong_python_is_refused_by_name(tmp_path):
    (tmp_path / "python3.9").write_text("#!/bin/sh\necho 3.9\n")
    (tmp_path / "python3.9").chmod(0o755)
    done = function("find_python", PYTHON=str(tmp_path / "python3.9"))
    assert done.returncode == 1
    assert "not a Python 3.11, 3.12 or 3.13 (it says: 3.9)" in done.stderr
    assert function("find_python", PYTHON=sys.executable).stdout.strip() == sys.executable


def test_nothing_installed_is_reported(project):
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
    own = [folder for folder in sys.path if "site-packages" not in folder]  # of Python
    monkeypatch.setattr(sys, "path", [str(tmp_path), *own])
    assert list(installation.damaged()) == ["cut==2.0"]
    (tmp_path / "whole.py").unlink()
    assert sorted(installation.damaged()) == ["cut==2.0", "whole==1.0"]


def test_an_update_keeps_files_of_the_user_and_refuses_changed_ones(tmp_path, monkeypatch, capfd):
    def git(folder, *words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)

    origin, mine = tmp_path / "origin", tmp_path / "my copy"
    origin.mkdir()
    monkeypatch.setattr(installer, "PROJECT_ROOT", origin)
    with pytest.raises(installer.Refusal, match="did not come by git"):
        installer.update()
    git(origin, "init", "-q")
    (origin / "code.py").write_text("old")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "one")
    git(tmp_path, "clone", "-q", origin, mine)
    (origin / "code.py").write_text("new")
    git(origin, "commit", "-qam", "two")
    (mine / "run.toml").write_text("mine")
    monkeypatch.setattr(installer, "PROJECT_ROOT", mine)
    (mine / "code.py").write_text("changed by hand")
    with pytest.raises(installer.Refusal, match="code.py"):
        installer.update()
    git(mine, "checkout", "-q", "code.py")
    installer.update()
    assert [(mine / name).read_text() for name in ("code.py", "run.toml")] == ["new", "mine"]


def test_the_set_up_for_windows_quotes_paths_and_shares_the_lock():
    raw = (source.ROOT / "setup.bat").read_bytes()
    text = raw.decode("ascii").replace("\r\n", "\n")
    assert raw.count(b"\n") == raw.count(b"\r\n")  # cmd loses labels in files with other line ends
    code = [line for line in text.splitlines() if not line.startswith(("rem", "echo"))]
    for line in code:  # a path with blanks, brackets or & stays one word
        outside = re.sub(r'"[^"]*"', "", line)
        assert not re.search(r"%(ROOT|VENV|OWN|UV|PYTHON)%", outside), line
    labels = set(re.findall(r"^:(\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"(?:goto|call) :?(\w+)", "\n".join(code))) <= labels
    commands = re.search(r"in \(([\w ]+)\) do if /i", text)
    assert commands and set(commands[1].split()) <= labels
    assert "DisableDelayedExpansion" in text  # else a ! in a path is lost
    assert '\nset "PYTHONHOME="\nset "PYTHONPATH="\n' in text  # else another Python's packages are loaded
    assert 'findstr /b "uv==" constraints.txt' in text
    words = set(re.findall(r"library\.setup\.installer (\w+)", text + (source.ROOT / "setup.sh").read_text()))
    assert words <= {"ensure", "again", "need", "update"}


def test_setup_bat_survives_that_it_is_replaced_while_the_page_is_open():
    """cmd continues at the same number of bytes in the new file, which may be in the middle of a word."""
    text = (source.ROOT / "setup.bat").read_text(encoding="ascii")
    long = [line for line in text.splitlines() if re.search(r"-m (kohya_gui|library\.cli\.main)\b", line)]
    assert len(long) == 3
    assert all(re.search(r" && exit /b 0 \|\| goto (\w+)$", line) for line in long)
    update = text[text.index("\n:update\n") :]
    assert re.search(r"\n\(\n.*installer update.*\n.*installer again\n +exit /b\n\)\n", update)


def test_setup_bat_of_version_0_3_finds_the_installer_after_its_update():
    """Windows has read the lines that follow the update before it, and they name the installer as it was called."""
    assert importlib.import_module("library.doctor.installer").main is installer.main


@pytest.mark.parametrize("token", ["", "a-token-of-sixteen-or-more"])
def test_a_rented_machine_always_asks_for_a_token(tmp_path, token):
    place, volume = tmp_path / "a b", tmp_path / "the volume"
    (place / "docker").mkdir(parents=True)
    volume.mkdir()
    shutil.copy(source.ROOT / "docker/start.sh", place / "docker/start.sh")
    (place / "setup.sh").write_text('#!/bin/sh\nprintf "<%s>" "$@"; echo " $KOHYA_HOME"\n')
    (place / "setup.sh").chmod(0o755)
    environment = {**os.environ, "VOLUME": str(volume), "KOHYA_TOKEN": token, "ALLOWED_HOST": "*.proxy.example"}
    environment.pop("KOHYA_HOME", None)
    line = ["bash", str(place / "docker/start.sh")]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=True, cwd=tmp_path)
    install, page = done.stdout.splitlines()
    assert install.startswith("<install>") and page.endswith(f" {volume}/.kohya")
    assert "<--host><0.0.0.0>" in page and "<--allowed-host><*.proxy.example>" in page
    assert (f"<--token-file><{volume}/.kohya/token>" in page) == (not token)
    assert "sixteen" not in page  # other users of the machine see command lines
    done = subprocess.run(line, capture_output=True, text=True, env={**environment, "VOLUME": "/nowhere"}, check=False)
    assert done.returncode == 1 and "Mount a volume" in done.stderr


def test_the_container_holds_no_secret_and_uses_the_lock():
    text = (source.ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "./setup.sh install" in code and "pip install" not in code  # which takes constraints.txt
    assert not re.search(r"(?i)token|password|secret", code)
    assert 'CMD ["docker/start.sh"]' in code
    assert "-p 127.0.0.1:7860:7860" in text
    left_out = (source.ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", ".venv", "**/*.token", "**/.env"} <= set(left_out)


def test_the_notebook_calls_commands_that_exist():
    notebook = json.loads((source.ROOT / "docs/colab.ipynb").read_text(encoding="utf-8"))
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    script = (source.ROOT / "setup.sh").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{name}\b.*\)", script) for name in re.findall(r"setup\.sh (\w+)", code))
    assert set(re.findall(r"bin/kohya (\w+)", code)) <= set(cli.COMMANDS)
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])


def test_windows_with_an_nvidia_gpu_gets_triton(asked, monkeypatch):
    monkeypatch.setattr(locked_packages, "WINDOWS", True)
    urls = []
    for build in ("cu130", "cpu", ""):
        asked.clear()
        installer.install_packages(build, "user")
        urls.append(any("triton-windows.txt" in word for line, _ in asked for word in line))
    assert urls == [True, False, False]


def test_every_dependency_is_locked():
    locked = [
        line.split("==")[0] for line in (source.ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    project = tomllib.loads((source.ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {Requirement(r).name.lower().replace("_", "-") for r in wanted}
    assert names <= set(locked)
    assert len(locked) == len(set(locked))
    assert not [name for name in locked if name.startswith("nvidia") and name != "nvidia-ml-py"]


def test_the_locks_have_every_version_with_hashes_and_no_index():
    """What `make lock` has to be run for: a version or a dependency that has changed."""
    constraints = dict(
        line.split("==") for line in (source.ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    locked = {}
    for name in installation.LOCKS:
        text = installation.lock_file(name).read_text(encoding="utf-8")
        blocks = locked_packages.split_lock(text)
        assert "://" not in text and all(block.count("--hash=sha256:") >= 1 for block in blocks)
        packages = [Requirement(block.partition(" \\")[0]) for block in blocks]
        locked[name] = {package.name: str(package.specifier).removeprefix("==") for package in packages}
        assert len(locked[name]) == len(blocks) == len(re.findall(r"^[^#\s]", text, re.M))
    everywhere = {name: version for versions in locked.values() for name, version in versions.items()}
    assert everywhere == {name: version for name, version in constraints.items() if name != "torch"}
    assert locked["user"].keys().isdisjoint(locked["dev"]) and set(locked["build"]) == {"pip", "setuptools", "uv"}
    project = tomllib.loads((source.ROOT / "pyproject.toml").read_text())["project"]
    needed = {"user": project["dependencies"], "dev": [*project["optional-dependencies"]["dev"]]}
    for kind, lines in needed.items():
        names = {Requirement(line).name.lower().replace("_", "-") for line in lines}
        assert names - {"torch"} <= {*locked["user"], *locked[kind]}
