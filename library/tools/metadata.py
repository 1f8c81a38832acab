"""What a file says about itself: shown and edited. Tensors are copied byte by byte, whatever they are."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from library.adapter_files import storage
from library.adapter_files.storage import Metadata, silent
from library.config.problems import ConfigError, Message, Report
from library.families.shared import weights
from library.files import need_space, write_atomic

PREFIXES = ("ss_", "sshs_", "modelspec.")


def show(path: str | Path) -> Metadata:
    """The metadata of a .safetensors file."""
    return storage.metadata_of(path)


def edit(
    path: str | Path,
    out: str | Path | None = None,
    *,
    values: Mapping[str, str] | None = None,
    remove: Iterable[str] = (),
    in_place: bool = False,
    report: Report = silent,
) -> Path:
    """Write the file again with some keys set and some removed; `remove` takes "ss_*" for all that begin so.

    Only keys of kohya (`ss_`) and of modelspec may be set. The result is a new file; `in_place` replaces the file
    itself, in one step and only when the new one is complete. Raises ConfigError for other keys and for what is not
    there.
    """
    path = storage.checked(path)
    if (out is None) != in_place:
        raise ConfigError("give the name of a new file, or say that the file itself shall be changed, not both")
    target = path if out is None else storage.fresh(out, path)
    changed = dict(show(path))
    for key in remove:
        gone = [name for name in changed if name == key or (key.endswith("*") and name.startswith(key[:-1]))]
        if not gone:
            raise ConfigError("{path} has no metadata {key}: nothing to remove", path=path, key=key)
        changed = {name: value for name, value in changed.items() if name not in gone}
    for key, value in (values or {}).items():
        if not key.startswith(PREFIXES) or key in PREFIXES:
            raise ConfigError(
                "{key} is not a key of metadata here: those begin with {prefixes}",
                key=key,
                prefixes=", ".join(PREFIXES),
            )
        changed[key] = str(value)
    table = {name: about for name, about in weights.raw_header(path).items() if name != "__metadata__"}
    need_space(target, path.stat().st_size)
    report(Message("writing"), 0, 1)
    written = write_atomic(target, lambda place: _copy(path, place, storage.header_bytes(table, changed)))
    report(Message("writing"), 1, 1)
    return written


def _copy(source: Path, place: Path, header: bytes) -> None:
    """The data of `source` behind another header, checked for its length."""
    with source.open("rb") as old, place.open("xb") as new:
        start = 8 + int.from_bytes(old.read(8), "little")
        old.seek(start)
        new.write(header)
        shutil.copyfileobj(old, new, 1 << 22)
        if new.tell() - len(header) != source.stat().st_size - start:
            raise OSError(f"{source} changed while it was read")
