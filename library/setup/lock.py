"""Write the files in `locks/` from constraints.txt and pyproject.toml: every package with the hashes of all its files.

    make lock

asks PyPI (the index of UV_DEFAULT_INDEX, where that is set) by uv. One file serves every system and Python: it holds
the hashes of all wheels, and says which packages only some systems need. PyTorch is not in it, nor what its builds
bring of CUDA: these come from PyTorch's own index, in the exact version.
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
EXTRAS = {"user": (), "dev": ("dev", "captioning")}
HEAD = "# Written by `make lock` from constraints.txt and pyproject.toml; not to be edited.\n"


def main() -> None:
    """Write all files of locks/."""
    project = str(installation.ROOT / "pyproject.toml")
    beside = sorted(_needed_by_torch())
    for kind, extras in EXTRAS.items():
        chosen = [word for extra in extras for word in ("--extra", extra)]
        _write(kind, [project, *chosen], beside)
    _write("build", [], ["pip", "setuptools", "uv"])
    _write("triton-windows", [], ["triton-windows ; sys_platform == 'win32'"])


def _write(name: str, sources: list[str], wanted: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        more, without, out = (Path(folder) / file for file in ("more.in", "without.txt", "out.txt"))
        more.write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        without.write_text(f"{TORCH} ; python_version < '3'\n", encoding="utf-8")
        line = [locked_packages.find_uv(), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        line += ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate", "--no-sources"]
        line += ["-c", locked_packages.LOCK, "--overrides", str(without), *sources, str(more), "-o", str(out)]
        # No index of this machine besides: what is locked is what PyPI has.
        own = {name: value for name, value in os.environ.items() if name not in ("UV_INDEX", "UV_FIND_LINKS")}
        subprocess.run(line, cwd=installation.ROOT, env=own, check=True)
        kept = [block for block in locked_packages.blocks(out.read_text(encoding="utf-8")) if ELSEWHERE not in block]
    place = installation.lock_file(name)
    place.parent.mkdir(exist_ok=True)
    place.write_text(HEAD + "".join(kept), encoding="utf-8", newline="\n")


def _needed_by_torch() -> Iterator[str]:
    """The packages besides CUDA's that PyTorch needs."""
    for line in importlib.metadata.requires(TORCH) or ():
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if "extra ==" not in line and not locked_packages.BROUGHT.match(name):
            yield name


if __name__ == "__main__":
    main()
