"""Write the files in `locks/` from constraints.txt and pyproject.toml: every package with the hashes of all its files.

    make lock

queries PyPI (or UV_DEFAULT_INDEX) by uv. One file serves every system and Python version: it contains the hashes of all
wheels, and marks packages that only some systems need. PyTorch and its CUDA packages are excluded: they come from
PyTorch's own index, in the exact version.
"""

import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from library.setup import installation, locked_packages

TORCH = "torch"
ELSEWHERE = "sys_platform == 'emscripten'"  # a system that PyTorch does not run on
DEV_EXTRAS = ("--extra", "dev", "--extra", "captioning")
LOCK_HEADER = "# Written by `make lock` from constraints.txt and pyproject.toml; not to be edited.\n"


def main() -> None:
    """Write all files of locks/."""
    project = str(installation.PROJECT_ROOT / "pyproject.toml")
    torch_requirements = sorted(_needed_by_torch())
    user = _write("user", _locked([project], torch_requirements))
    _write("dev", (block for block in _locked([project, *DEV_EXTRAS], torch_requirements) if block not in user))
    _write("build", _locked([], ["pip", "setuptools", "uv"]))
    _write("triton-windows", _locked([], ["triton-windows ; sys_platform == 'win32'"]))


def _write(name: str, blocks: Iterable[str]) -> str:
    """Write a file of locks/ and return its text."""
    place = installation.lock_file(name)
    place.parent.mkdir(exist_ok=True)
    place.write_text(text := LOCK_HEADER + "".join(blocks), encoding="utf-8", newline="\n")
    return text


def _locked(sources: list[str], requirements: Iterable[str]) -> list[str]:
    """Return each package that these need, with its hashes."""
    with tempfile.TemporaryDirectory() as folder:
        requirements_file, overrides_file, out = (Path(folder) / file for file in ("more.in", "without.txt", "out.txt"))
        requirements_file.write_text("".join(f"{requirement}\n" for requirement in requirements), encoding="utf-8")
        # An override that never holds leaves PyTorch out of the lock.
        overrides_file.write_text(f"{TORCH} ; python_version < '3'\n", encoding="utf-8")
        command = [locked_packages.find_uv(), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        command += ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate", "--no-sources"]
        command += ["-c", locked_packages.LOCK, "--overrides", str(overrides_file), *sources]
        command += [str(requirements_file), "-o", str(out)]
        # Ignore this machine's other indexes, as the locks must match PyPI.
        environment = {name: value for name, value in os.environ.items() if name not in ("UV_INDEX", "UV_FIND_LINKS")}
        subprocess.run(command, cwd=installation.PROJECT_ROOT, env=environment, check=True)
        return [
            block for block in locked_packages.split_lock(out.read_text(encoding="utf-8")) if ELSEWHERE not in block
        ]


def _needed_by_torch() -> Iterator[str]:
    """Return the packages besides CUDA's that PyTorch needs."""
    for line in importlib.metadata.requires(TORCH) or ():
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if "extra ==" not in line and not locked_packages.BROUGHT.match(name):
            yield name


if __name__ == "__main__":
    main()
