"""Packages that a training may need besides PyTorch: whether each is installed and loads, and how to install it.

Loading one takes PyTorch and seconds, so callers that must not wait (the page) use what is known from the package's
files and from the last attempt. setup.sh, `kohya doctor`, `kohya check` and every training load them, and store the
result.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from library.config.command import quote_command
from library.config.environment import OUTPUT_IN_UTF_8
from library.config.outside_files import load_json
from library.config.problems import ConfigError, Message, Problem
from library.config.values import did_you_mean
from library.files import cache_folder, write_atomic

# A package counts as working once it has stepped a weight on the training's device. The page must not load PyTorch, so
# it relies on stored results.
# Why: docs/decisions/2026-11-22-optimizer-packages-are-installed.md
# Import name -> name for installing.
PACKAGE_NAMES = {
    "bitsandbytes": "bitsandbytes",
    "dadaptation": "dadaptation",
    "lion_pytorch": "lion-pytorch",
    "lycoris": "lycoris-lora",
    "prodigyopt": "prodigyopt",
    "prodigyplus": "prodigy-plus-schedule-free",
    "pytorch_optimizer": "pytorch-optimizer",
    "schedulefree": "schedulefree",
}
# Attention kernels besides PyTorch's -> their packages, and the modules that have them. flash-attn, an older package,
# has no `cute`.
KERNEL_PACKAGES = {
    "sage": ("sageattention", "sageattention"),
    "flash3": ("flash_attn_3", "flash_attn_interface"),
    "flash4": ("flash-attn-4", "flash_attn.cute"),
}
LOCKED = Path(__file__).resolve().parents[1] / "constraints.txt"
RETRY_AFTER = 600.0  # seconds after which a failed package is tried again
IMPORT_TIMEOUT = 120.0  # timeout in seconds for loading one in a separate process


def package_name(module: str) -> str:
    return PACKAGE_NAMES.get(module, module)


@functools.cache
def locked() -> Mapping[str, str]:
    lines = LOCKED.read_text(encoding="utf-8").splitlines() if LOCKED.exists() else []
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def install_command(*modules: str, again: bool = False) -> str:
    """Return the command that installs packages into the current environment, in the tested versions."""
    names = [package_name(module) for module in modules]
    requirements = [f"{name}=={locked()[name]}" if name in locked() else name for name in names]
    command = [sys.executable, "-m", "pip", "install", *(["--force-reinstall", "--no-deps"] * again), *requirements]
    return quote_command(command)


def is_installed(module: str) -> bool:
    """Return whether a package can be found, without loading it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def has_kernel(kernel: str) -> bool:
    return is_installed(KERNEL_PACKAGES[kernel][1])


def missing_kernel_package(option: str, kernel: str) -> Problem | None:
    """Return the problem of an option that chooses an attention kernel whose package is missing."""
    if kernel not in KERNEL_PACKAGES or has_kernel(kernel):
        return None
    return Problem(
        option,
        ": {kernel} needs the package {package}, which is not installed here; use auto",
        kernel=kernel,
        package=KERNEL_PACKAGES[kernel][0],
        fix={option: "auto"},
    )


def not_installed(module: str) -> Message:
    """Return the end of a sentence about a missing package."""
    if module not in PACKAGE_NAMES:  # never suggest installing an arbitrary typed name from a registry
        template = "names the package {package}, which is not installed here{hint}"
        return Message(template, package=module, hint=did_you_mean(module, PACKAGE_NAMES))
    return Message("needs a package that is not installed: {command}", command=install_command(module))


def package_error(module: str, error: str) -> Message:
    template = "needs {package}, which does not load here ({error}): {command}"
    return Message(template, package=package_name(module), error=error, command=install_command(module, again=True))


def obstacle(module: str) -> Message | None:
    """Return the end of a sentence about a package that is missing or does not load; None if it works."""
    if not is_installed(module):
        return not_installed(module)
    error = loading_failure(module) if module in PACKAGE_NAMES else ""
    return package_error(module, error) if error else None


def loading_failure(module: str) -> str:
    """Return why an installed package does not load, "" if it does, without loading it in this process.

    A stored result counts until the package changes. An untried package counts as loading if its files are exactly
    pip's; otherwise, and some time after a failure, it is loaded in a separate process.
    """
    record = _remembered_packages().get(module, {})
    if record.get("of") == _fingerprint(module):
        if not record["error"] or time.time() - record["when"] < RETRY_AFTER:
            return record["error"]
    elif _is_tested_version(module):
        return ""
    return examine_packages([module]).get(module, "")


def examine_packages(modules: Iterable[str], patience: float = IMPORT_TIMEOUT) -> dict[str, str]:
    """Load packages in a separate process and store the results: by module the error, "" if it loads."""
    installed = [module for module in modules if is_installed(module)]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **OUTPUT_IN_UTF_8, "PYTHONPATH": paths}
    # -P keeps the current folder off the path, whose files could shadow packages.
    command = [sys.executable, "-P", "-m", "library.optim.trial", *installed]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
        completed = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=patience,
            check=False,
        )
        # Packages may print while they are imported; the result is the last line.
        return json.loads(completed.stdout.splitlines()[-1]) if completed.stdout.strip() else {}
    return {}


def remember(module: str, error: str) -> None:
    """Store the result of loading a package."""
    records, fingerprint = _remembered_packages(), _fingerprint(module)
    if records.get(module, {}).get("of") == fingerprint and records[module]["error"] == error and not error:
        return
    records[module] = {"of": fingerprint, "error": error, "when": time.time()}
    with contextlib.suppress(OSError, ConfigError):  # without a stored result it is tried again next time
        write_atomic(_packages_file(), json.dumps(records, indent=1))


# ---- what is known


def _packages_file() -> Path:
    return cache_folder() / "packages.json"


def _remembered_packages() -> dict[str, dict]:
    with contextlib.suppress(ConfigError, OSError):
        records = load_json(_packages_file())
        if isinstance(records, dict) and all(
            isinstance(record, dict) and {"of", "error", "when"} <= record.keys() for record in records.values()
        ):
            return records
    return {}


def _fingerprint(module: str) -> str:
    # A stored result counts only as long as none of these has changed.
    facts = [
        sys.prefix,
        installed_version("torch"),
        installed_version(package_name(module)),
        *map(str, _origin(module)),
    ]
    return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _origin(module: str) -> tuple[str, int, int]:
    """Return the first loaded file, its modification time and size."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        if (spec := importlib.util.find_spec(module)) and spec.origin:
            status = os.stat(spec.origin)
            return spec.origin, status.st_mtime_ns, status.st_size
    return "", 0, 0


def installed_version(name: str) -> str:
    """Return the version of an installed package from its metadata, "" if there is none; loads nothing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _is_tested_version(module: str) -> bool:
    """Return whether a package is the tested version, found first, with all its files as long as pip wrote them."""
    name = package_name(module)
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    files = [file for file in package.files or () if file.suffix != ".pyc" and ".." not in file.parts]
    sizes = {Path(str(file.locate())): file.size for file in files}
    try:
        is_complete = all(size is None or path.stat().st_size == size for path, size in sizes.items())
    except OSError:
        return False
    return is_complete and package.version == locked().get(name) and Path(_origin(module)[0]) in sizes


# ---- in words


def package_lines(errors: Mapping[str, str]) -> Iterator[str]:
    """Return setup.sh's lines about the packages, from the errors by module."""
    for module in PACKAGE_NAMES:
        if not is_installed(module):
            yield f"{package_name(module)} is not installed. To install it: {install_command(module)}"
        elif module not in errors:
            yield f"{package_name(module)} could not be tried; kohya doctor tries it again."
        elif error := errors[module]:
            command = install_command(module, again=True)
            yield f"{package_name(module)} does not load here ({error}). To install it again: {command}"
    if "bitsandbytes" not in errors or errors["bitsandbytes"]:
        yield "Without bitsandbytes use AdamW instead of AdamW8bit; it needs more memory."


if __name__ == "__main__":
    # New packages have no compiled or cached files yet.
    problems = list(package_lines(examine_packages(PACKAGE_NAMES, patience=600.0)))
    print("\n".join(problems) or "The optimizers' packages and LyCORIS work.")
    sys.exit(bool(problems))
