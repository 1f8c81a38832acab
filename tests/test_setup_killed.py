"""setup.sh is killed at each of its phases, and run again: it ends with a whole installation.

What downloads and installs (Python's venv and pip, uv) is a stand-in that puts small packages into the environment; the
script, the installer and the checks are the real ones. The stand-in leaves what it does half done when it is killed.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest

from library.setup import installation
from tests import source
from tests.test_setup import INSTALLER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="setup.sh is for systems with bash"),
]
# Stands for `python` outside of the environment, and for uv inside of it. Its calls are counted over all runs of a
# project; at the one whose number KILL_AT has, all of setup.sh is killed, as by a power cut.
STAND_IN = """#!{python}
import json, os, pathlib, re, signal, subprocess, sys
root, given = pathlib.Path({root!r}), sys.argv[1:]
venv = root / ".venv"

def put(name, version, half):
    place = next((venv / "lib").glob("python*")) / "site-packages"
    about = place / (name.replace("-", "_") + "-" + version + ".dist-info")
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\\nName: " + name + "\\nVersion: " + version + "\\n")
    module = name.replace("-", "_") + "/__init__.py"
    (place / module).parent.mkdir(exist_ok=True)
    (place / module).write_text("")
    if name == "pip" and not half:
        (place / "pip/__main__.py").write_text(
            "import os, sys; os.execv(" + repr(__file__) + ", [" + repr(__file__) + ", '-m', 'pip', *sys.argv[1:]])"
        )
    if not half:
        (about / "RECORD").write_text(module + ",,\\n" + about.name + "/METADATA,,\\n")

def work(half):
    if given[:2] == ["-m", "venv"]:
        if half:
            venv.mkdir()
        else:
            subprocess.run([{python!r}, *given], check=True)
    elif given[:2] == ["-m", "ensurepip"]:
        put("pip", "1.0", half)
    elif "install" in given:
        wanted = [word for word in given if "==" in word]
        for path in [given[at + 1] for at, word in enumerate(given) if word == "-r"]:
            wanted += re.findall(r"^([\\w.-]+==[^ ;]+)", pathlib.Path(root, path).read_text(), re.M)
        for number, one in enumerate(wanted):
            name, version = one.split("==")
            put(name, version, half and number == len(wanted) // 2)
            if half and number == len(wanted) // 2:
                return
        if "-e" in given and not half:
            (next((venv / "lib").glob("python*")) / "site-packages/itself.pth").write_text(str(root))
        if any(one.startswith("uv==") for one in wanted):
            (venv / "bin/uv").write_text(pathlib.Path(__file__).read_text())
            (venv / "bin/uv").chmod(0o755)

if given[:1] == ["-c"]:
    os.execv({python!r}, [{python!r}, *given])
if given[-1] == "--version" or "config" in given:
    sys.exit()
calls = root / "calls.json"
done = json.loads(calls.read_text()) if calls.exists() else []
calls.write_text(json.dumps([*done, given]))
killed = len(done) == int(os.environ.get("KILL_AT", -1))
work(half=killed)
if killed:
    os.killpg(0, signal.SIGKILL)
"""
LOADED = "library/cli/__init__.py", "library/cli/main.py", "library/packages.py", "kohya_gui/__init__.py"


@pytest.fixture
def project(tmp_path):
    """A project with small locks, none of whose programs does more than it has to."""
    for name in ("setup.sh", *installation.LOCKED, *(f"library/{name}" for name in INSTALLER)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.ROOT / name, tmp_path / name)
    for name in LOADED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for kind, packages in {"build": ["pip==1.0", "uv==1.0"], "user": ["one==1.0", "gradio==1.0", "two==1.0"]}.items():
        lock = "".join(f"{package} \\\n    --hash=sha256:{'0' * 64}\n" for package in packages)
        (tmp_path / "locks" / f"{kind}.txt").write_text(lock)
    python = tmp_path / "bin/python3.11"
    python.parent.mkdir()
    python.write_text(STAND_IN.format(python=sys.executable, root=str(tmp_path)))
    (tmp_path / "instead").mkdir()
    (tmp_path / "instead/ensurepip.py").write_text(
        f"import os; os.execv({str(python)!r}, [{str(python)!r}, '-m', 'ensurepip'])"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def started(project, *line, **more):
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    environment = {**outside, "PYTHON": str(project / "bin/python3.11"), "KOHYA_TORCH": "cpu"}
    environment |= {"PYTHONPATH": str(project / "instead"), **more}
    how = {"capture_output": True, "text": True, "check": False, "start_new_session": True}
    return subprocess.run([str(word) for word in line], cwd=project, env=environment, **how)


def run(project, command="install", **more):
    return started(project, "bash", project / "setup.sh", command, **more)


def is_healthy(project):
    """Everything is there, nothing of it is damaged, and the marker says so."""
    code = (
        "from library.setup import installation, installer, locked_packages; import json; installer.need();"
        "print(json.dumps([list(installation.damaged()), locked_packages.has_torch('cpu')]))"
    )
    done = started(project, project / ".venv/bin/python", "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) == [[], True] and not (project / ".venv/installing.txt").exists()


def calls(project):
    return json.loads((project / "calls.json").read_text())


def test_a_set_up_that_is_killed_anywhere_ends_healthy_when_it_is_run_again(project):
    first = run(project)
    assert first.returncode == 0, first.stdout + first.stderr
    assert is_healthy(project)
    phases = calls(project)
    kinds = [" ".join(call) for call in phases]
    assert "venv" in kinds[0] and any("build.txt" in kind for kind in kinds)
    assert any("torch==" in kind for kind in kinds) and "check" in kinds[-1] and len(phases) >= 6
    for at in range(len(phases)):
        shutil.rmtree(project / ".venv")
        (project / "calls.json").unlink()
        killed = run(project, KILL_AT=str(at))
        assert killed.returncode == -signal.SIGKILL and len(calls(project)) == at + 1, (at, killed.stderr)
        assert not (project / ".venv/installed.txt").exists(), phases[at]
        again = run(project)
        assert again.returncode == 0, (phases[at], again.stdout, again.stderr)
        assert is_healthy(project), phases[at]


def test_one_that_is_killed_while_the_marker_is_written_ends_healthy(project):
    """The last of its steps, in which no other program runs."""
    assert run(project).returncode == 0
    marker = project / ".venv/installed.txt"
    marker.rename(marker.with_suffix(".new"))
    (project / ".venv/installing.txt").write_text("Tools of this machine\n")
    refused = run(project, "gui")
    assert refused.returncode == 1 and "it was at: Tools of this machine" in refused.stderr
    assert run(project).returncode == 0 and is_healthy(project)
