"""Install the packages with the versions and hashes of locks/: by uv, or by pip if uv is unavailable.

Loads only the standard library, as the packages may be missing.
"""

import ast
import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from library.setup import installation

PROJECT_ROOT = installation.PROJECT_ROOT
PYTHON = sys.executable
ENVIRONMENT = Path(sys.prefix)
TORCH = "2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/"
WINDOWS = os.name == "nt"
LOCK = "constraints.txt"  # used from its own folder, as pip splits PIP_CONSTRAINT at spaces
# Only hashed packages are downloaded, including build dependencies.
HASHED = ("--require-hashes", "--no-deps", "--no-build-isolation")
ITSELF = ("--no-deps", "--no-build-isolation", "-e", ".")
OTHER_INDEXES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL")
BROUGHT = re.compile(r"(torch|nvidia|cuda|triton)([-_=]|$)")  # PyTorch and the packages of its builds

# Why: docs/decisions/2026-11-22-uv-installs-set-as-pip.md
# Options of pip -> uv's variables for them, and uv's separator of several values.
SAME_IN_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "retries": ("UV_HTTP_RETRIES", " "),
    "keyring-provider": ("UV_KEYRING_PROVIDER", " "),
}


class Refusal(Exception):
    """The installation cannot continue; the text says why and what to do."""


def say(text: str) -> None:
    # Output of started programs appears between these lines.
    print(text, flush=True)


# ---- PyTorch


def torch_there() -> tuple[str, str]:
    """Return version and build of the installed PyTorch, without loading it; "" and "" without one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version, _, build = importlib.metadata.version("torch").partition("+")
        return version, build
    return "", ""


def has_torch(build: str) -> bool:
    version, have = torch_there()
    return version == TORCH and build in ("", have)


# ---- uv, set as pip is


def find_uv() -> str:
    """Return the uv of this environment or machine, installed by pip if missing; "" if unavailable."""
    if os.environ.get("KOHYA_INSTALLER") == "pip":
        return ""
    environment_uv = ENVIRONMENT / ("Scripts/uv.exe" if WINDOWS else "bin/uv")
    if not environment_uv.exists() and not shutil.which("uv"):
        command = [PYTHON, "-m", "pip", "install", *HASHED, "-r", str(installation.lock_file("build"))]
        # A failure shows below, where uv is tried.
        subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, check=False)
    uv = str(environment_uv) if environment_uv.exists() else "uv"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([uv, "--version"], capture_output=True, timeout=60, check=True)
        return uv
    say("uv cannot be had here; pip installs instead, which takes longer.")
    return ""


def in_onedrive() -> bool:
    """Return whether this project is in a folder that Windows' OneDrive copies to its servers."""
    folders = [os.environ.get(name) for name in ("OneDrive", "OneDriveConsumer", "OneDriveCommercial")]
    return WINDOWS and any(PROJECT_ROOT.is_relative_to(folder) for folder in folders if folder)


def settings_of_pip() -> dict[str, list[str]]:
    """Return pip's settings by option, from its files and variables. Variables win over the section `install`, and that
    over `global`.
    """
    command = [PYTHON, "-m", "pip", "config", "list"]
    completed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    settings: dict[str, list[str]] = {}
    for section in ("global", "install", ":env:"):
        for option, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", completed.stdout, re.MULTILINE):
            settings[option] = str(ast.literal_eval(value)).split()
    return settings


def uv_settings(pip_settings: Mapping[str, Sequence[str]]) -> tuple[dict[str, str], list[str]]:
    """Convert pip's settings to variables and arguments of uv. uv's own variables win."""
    variables = {"UV_SYSTEM_CERTS": "1"}  # like pip
    if in_onedrive():  # it refuses hard links
        variables["UV_LINK_MODE"] = "copy"
    for option, (variable, separator) in SAME_IN_UV.items():
        if values := pip_settings.get(option):
            variables[variable] = separator.join(values)
    arguments = [word for file in pip_settings.get("constraint", ()) for word in ("-c", file)]
    arguments += ["--no-index"] * (pip_settings.get("no-index", [""])[0].lower() in ("1", "true", "yes", "on"))
    return {**variables, **os.environ}, arguments


# ---- the packages


# Why: docs/decisions/2026-11-27-hashes-for-all-but-torch.md
@dataclass(frozen=True)
class PackagePlan:
    """What to install."""

    torch: str  # PyTorch's requirement
    index: str  # the only index that PyTorch and its CUDA parts may come from; "": where the packages come from
    locks: tuple[str, ...]  # files of locks/, in this order
    again: Path | None = None  # lock file of damaged packages
    brought: tuple[str, ...] = ()  # damaged packages of PyTorch's build, and PyTorch itself
    user_packages: tuple[str, ...] = ()  # damaged packages that the user has added


def install_packages(build: str, kind: str) -> str:
    """Install PyTorch and everything else in the locked versions. Returns the uv used, "" for pip.

    Everything but PyTorch must match the locks' hashes, whatever index it comes from.
    """
    torch = f"torch=={TORCH}+{build}" if build else f"torch=={TORCH}"
    broken = list(installation.damaged())
    is_whole = has_torch(build) and not any(map(BROUGHT.match, broken))
    index = TORCH_INDEX + build if build and not is_whole else ""
    locks = ("build", "user", *["dev"] * (kind == "dev"), *["triton-windows"] * (WINDOWS and build.startswith("cu")))
    if broken:
        say(f"An earlier installation was interrupted; installing again: {' '.join(broken)}")
    uv = find_uv()
    if uv and install_with_uv(uv, with_damaged(PackagePlan(torch, index, locks), broken)):
        return uv
    if uv:
        say("uv did not install everything (see above); pip tries it.")
    install_with_pip(with_damaged(PackagePlan(torch, index, locks), [*broken, *installation.damaged()]))
    return ""


def with_damaged(plan: PackagePlan, broken: Sequence[str]) -> PackagePlan:
    """Add packages to reinstall to a plan; locked ones with their hashes."""
    if not broken:
        return plan
    locked_blocks = {
        _plain_name(block): block
        for name in plan.locks
        for block in split_lock(installation.lock_file(name).read_text(encoding="utf-8"))
    }
    locked = dict.fromkeys(
        locked_blocks[_plain_name(requirement)] for requirement in broken if _plain_name(requirement) in locked_blocks
    )
    unlocked = dict.fromkeys(requirement for requirement in broken if _plain_name(requirement) not in locked_blocks)
    brought = tuple(requirement for requirement in unlocked if BROUGHT.match(requirement))
    damaged_lock = ENVIRONMENT / "again.txt"
    damaged_lock.write_text("".join(locked), encoding="utf-8")
    user_packages = tuple(requirement for requirement in unlocked if requirement not in brought)
    return replace(plan, again=damaged_lock if locked else None, brought=brought, user_packages=user_packages)


def split_lock(lock: str) -> list[str]:
    return re.findall(r"^[\w.-]+==.*\n(?:[ \t].*\n)*", lock, re.MULTILINE)


def _plain_name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement.partition("==")[0]).lower()


def install_with_uv(uv: str, plan: PackagePlan) -> bool:
    """Install a plan by uv; return whether that succeeded."""
    variables, arguments = uv_settings(settings_of_pip())
    # Like pip, choose the best version of all indexes; only files with these hashes are accepted.
    lock_variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", **variables}
    no_index = [word for word in arguments if word == "--no-index"]
    install, reinstall = [uv, "pip", "install", "--python", PYTHON], ["--reinstall", "--no-deps"]
    torch_variables = variables
    install_torch = [*install, "-c", LOCK, "-b", LOCK, *arguments]
    if plan.index:
        install_torch += ["--default-index", plan.index]
        torch_variables = {name: value for name, value in variables.items() if name not in OTHER_INDEXES}
    commands = [
        ([*install, *no_index, *HASHED, *extra, "-r", path], lock_variables)
        for path, extra in _write_requirements(plan, reinstall)
    ]
    commands += [([*install_torch, *reinstall, *plan.brought], torch_variables)] if plan.brought else []
    commands += [([*install_torch, plan.torch], torch_variables)]
    commands += [([*install, *arguments, *reinstall, *plan.user_packages], variables)] if plan.user_packages else []
    commands += [([*install, *ITSELF], variables)]
    return all(
        subprocess.run(command, cwd=PROJECT_ROOT, env=env, check=False).returncode == 0 for command, env in commands
    )


def install_with_pip(plan: PackagePlan) -> None:
    """Install a plan by pip; raise Refusal on failure."""
    install, reinstall = [PYTHON, "-m", "pip", "install"], ["--force-reinstall", "--no-deps"]
    install_torch = [*install, *(["--index-url", plan.index] if plan.index else [])]
    constraint_variables = {**os.environ, "PIP_CONSTRAINT": LOCK}
    commands = [([*install, *HASHED, *extra, "-r", path], None) for path, extra in _write_requirements(plan, reinstall)]
    commands += [([*install_torch, *reinstall, *plan.brought], constraint_variables)] if plan.brought else []
    commands += [([*install_torch, plan.torch], constraint_variables)]
    commands += [([*install, *reinstall, *plan.user_packages], None)] if plan.user_packages else []
    commands += [([*install, *ITSELF], None)]
    for command, env in commands:
        if subprocess.run(command, cwd=PROJECT_ROOT, env=env, check=False).returncode:
            raise Refusal(
                "pip could not install the packages; see above.\n"
                "If it did not reach the package index: look at the network, and at: pip config list"
            )


def _write_requirements(plan: PackagePlan, reinstall: list[str]) -> list[tuple[str, list[str]]]:
    files = [(str(installation.lock_file(name)), list[str]()) for name in plan.locks]
    return [*files, (str(plan.again), reinstall)] if plan.again else files
