"""Install the packages with the versions and hashes of locks/: by uv, or by pip where uv cannot be had.

Loads nothing but the standard library, as the packages may not be there.
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

ROOT = installation.ROOT
PYTHON = sys.executable
ENVIRONMENT = Path(sys.prefix)
TORCH = "2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/"
WINDOWS = os.name == "nt"
LOCK = "constraints.txt"  # always named from its own folder: pip cuts PIP_CONSTRAINT at blanks
# Nothing without a hash is downloaded, nor anything besides: also what a package is built with is locked.
HASHED = ("--require-hashes", "--no-deps", "--no-build-isolation")
ITSELF = ("--no-deps", "--no-build-isolation", "-e", ".")
OTHER_INDEXES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL")
BROUGHT = re.compile(r"(torch|nvidia|cuda|triton)([-_=]|$)")  # PyTorch, and what its builds bring

# Why: docs/decisions/2026-11-22-uv-installs-set-as-pip.md
# Options of pip and the variables by which uv is told the same, with what uv puts between several values.
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
    """The installation cannot go on; the text says why and what to do."""


def say(text: str = "") -> None:
    """Print at once: programs that are started print between these lines."""
    print(text, flush=True)


# ---- PyTorch


def torch_there() -> tuple[str, str]:
    """Version and build of the installed PyTorch, without loading it; '' and '' where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version, _, build = importlib.metadata.version("torch").partition("+")
        return version, build
    return "", ""


def has_torch(build: str) -> bool:
    """Whether the wanted version is installed, in the wanted build if one is wanted."""
    version, have = torch_there()
    return version == TORCH and build in ("", have)


# ---- uv, set as pip is


def find_uv() -> str:
    """The uv of this environment or of the machine, installed here by pip if there is none; '' if it cannot be had."""
    if os.environ.get("KOHYA_INSTALLER") == "pip":
        return ""
    own = ENVIRONMENT / ("Scripts/uv.exe" if WINDOWS else "bin/uv")
    if not own.exists() and not shutil.which("uv"):
        line = [PYTHON, "-m", "pip", "install", *HASHED, "-r", str(installation.lock_file("build"))]
        subprocess.run(line, cwd=ROOT, capture_output=True, check=False)
    found = str(own) if own.exists() else "uv"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([found, "--version"], capture_output=True, timeout=60, check=True)
        return found
    say("uv cannot be had here; pip installs instead, which takes longer.")
    return ""


def settings_of_pip() -> dict[str, list[str]]:
    """What pip is told by its files and variables, by option: the variables win over `install`, that over `global`."""
    asked = [PYTHON, "-m", "pip", "config", "list"]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace", check=False)
    found: dict[str, list[str]] = {}
    for section in ("global", "install", ":env:"):
        for option, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", done.stdout, re.MULTILINE):
            found[option] = str(ast.literal_eval(value)).split()
    return found


def uv_settings(told: Mapping[str, Sequence[str]]) -> tuple[dict[str, str], list[str]]:
    """pip's settings as variables and arguments of uv. What uv was told by its own variables stays."""
    variables = {"UV_SYSTEM_CERTS": "1"}  # as pip does
    for option, (variable, between) in SAME_IN_UV.items():
        if values := told.get(option):
            variables[variable] = between.join(values)
    arguments = [word for file in told.get("constraint", ()) for word in ("-c", file)]
    arguments += ["--no-index"] * (told.get("no-index", [""])[0].lower() in ("1", "true", "yes", "on"))
    return {**variables, **os.environ}, arguments


# ---- the packages


# Why: docs/decisions/2026-11-27-hashes-for-all-but-torch.md
@dataclass(frozen=True)
class PackagePlan:
    """What is to be installed."""

    torch: str  # the requirement of PyTorch
    index: str  # the only index that PyTorch and its CUDA parts may come from; "": where the packages come from
    locks: tuple[str, ...]  # files of locks/, in this order
    again: Path | None = None  # locked packages that are damaged, a file like those
    brought: tuple[str, ...] = ()  # damaged packages that come with PyTorch, and PyTorch itself
    others: tuple[str, ...] = ()  # damaged packages of the user's own


def install_packages(build: str, kind: str) -> str:
    """Install PyTorch and everything else in the versions of the locks. Returns the uv that did, '' if pip had to.

    Everything but PyTorch has to have the hashes of the locks, whatever index it comes from.
    """
    torch = f"torch=={TORCH}+{build}" if build else f"torch=={TORCH}"
    broken = list(installation.damaged())
    is_whole = has_torch(build) and not any(map(BROUGHT.match, broken))
    index = TORCH_INDEX + build if build and not is_whole else ""
    locks = ("build", kind, *["triton-windows"] * (WINDOWS and build.startswith("cu")))
    if broken:
        say(f"An earlier installation was interrupted; installing again: {' '.join(broken)}")
    uv = find_uv()
    if uv and by_uv(uv, with_damaged(PackagePlan(torch, index, locks), broken)):
        return uv
    if uv:
        say("uv did not install everything (see above); pip tries it.")
    by_pip(with_damaged(PackagePlan(torch, index, locks), [*broken, *installation.damaged()]))
    return ""


def with_damaged(wanted: PackagePlan, broken: Sequence[str]) -> PackagePlan:
    """What is wanted, with packages that have to be installed again: those of the locks with their hashes."""
    if not broken:
        return wanted
    known = {
        _plain_name(block): block
        for name in wanted.locks
        for block in blocks(installation.lock_file(name).read_text(encoding="utf-8"))
    }
    locked = dict.fromkeys(known[_plain_name(one)] for one in broken if _plain_name(one) in known)
    rest = dict.fromkeys(one for one in broken if _plain_name(one) not in known)
    brought = tuple(one for one in rest if BROUGHT.match(one))
    again = ENVIRONMENT / "again.txt"
    again.write_text("".join(locked), encoding="utf-8")
    others = tuple(one for one in rest if one not in brought)
    return replace(wanted, again=again if locked else None, brought=brought, others=others)


def blocks(lock: str) -> list[str]:
    """The packages of a lock, each with the lines of its hashes."""
    return re.findall(r"^[\w.-]+==.*\n(?:[ \t].*\n)*", lock, re.MULTILINE)


def _plain_name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement.partition("==")[0]).lower()


def by_uv(uv: str, wanted: PackagePlan) -> bool:
    """Install what is wanted; whether that went well."""
    variables, arguments = uv_settings(settings_of_pip())
    # As with pip the best version of all indexes counts; only files with these hashes do.
    of_locks = {"UV_INDEX_STRATEGY": "unsafe-best-match", **variables}
    no_index = [word for word in arguments if word == "--no-index"]
    line, again, alone = [uv, "pip", "install", "--python", PYTHON], ["--reinstall", "--no-deps"], variables
    of_torch = [*line, "-c", LOCK, "-b", LOCK, *arguments]
    if wanted.index:
        of_torch += ["--default-index", wanted.index]
        alone = {name: value for name, value in variables.items() if name not in OTHER_INDEXES}
    lines = [([*line, *no_index, *HASHED, *extra, "-r", path], of_locks) for path, extra in _files(wanted, again)]
    lines += [([*of_torch, *again, *wanted.brought], alone)] if wanted.brought else []
    lines += [([*of_torch, wanted.torch], alone)]
    lines += [([*line, *arguments, *again, *wanted.others], variables)] if wanted.others else []
    lines += [([*line, *ITSELF], variables)]
    return all(subprocess.run(one, cwd=ROOT, env=env, check=False).returncode == 0 for one, env in lines)


def by_pip(wanted: PackagePlan) -> None:
    """As `by_uv`; raises Refusal where it does not go well."""
    line, again = [PYTHON, "-m", "pip", "install"], ["--force-reinstall", "--no-deps"]
    of_torch = [*line, *(["--index-url", wanted.index] if wanted.index else [])]
    locked = {**os.environ, "PIP_CONSTRAINT": LOCK}
    lines = [([*line, *HASHED, *extra, "-r", path], None) for path, extra in _files(wanted, again)]
    lines += [([*of_torch, *again, *wanted.brought], locked)] if wanted.brought else []
    lines += [([*of_torch, wanted.torch], locked)]
    lines += [([*line, *again, *wanted.others], None)] if wanted.others else []
    lines += [([*line, *ITSELF], None)]
    for one, env in lines:
        if subprocess.run(one, cwd=ROOT, env=env, check=False).returncode:
            raise Refusal(
                "pip could not install the packages; see above.\n"
                "If it did not reach the package index: look at the network, and at: pip config list"
            )


def _files(wanted: PackagePlan, again: list[str]) -> list[tuple[str, list[str]]]:
    """The files of locked packages in their order, with the options for those that are installed `again`."""
    files = [(str(installation.lock_file(name)), list[str]()) for name in wanted.locks]
    return [*files, (str(wanted.again), again)] if wanted.again else files
