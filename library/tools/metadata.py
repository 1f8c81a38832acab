"""Show and edit a file's metadata. Tensors are copied byte by byte, whatever their dtype."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from library.adapter_files import storage
from library.adapter_files.storage import Metadata, silent
from library.config.problems import ConfigError, Message, Report, option_name
from library.families.shared.raw_header import read_raw_header
from library.files import make_space, write_atomic

METADATA_PREFIXES = ("ss_", "sshs_", "modelspec.")


def read_metadata(path: str | Path) -> Metadata:
    """Return a file's metadata. Raises ConfigError for a folder, which has none."""
    if Path(path).is_dir():
        raise ConfigError(storage.NOT_ONE_FILE, path=path)
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
    """Write the file again with some keys set and some removed; `remove` accepts "ss_*" for a prefix.

    Only keys of kohya (`ss_`) and of modelspec may be set. The result is a new file; `in_place` replaces the file
    itself atomically. Raises ConfigError for other keys and missing files.
    """
    path = storage.check_readable(path)
    if (out is None) != in_place:
        template = "{out} is missing: give the name of a new file"
        if in_place:
            template = "{out} and in_place exclude each other: give the name of a new file, or change the file itself"
        raise ConfigError(template, out=option_name("out"))
    target = path if out is None else storage.fresh(out, path)
    changed = dict(read_metadata(path))
    for key in remove:
        gone = [name for name in changed if name == key or (key.endswith("*") and name.startswith(key[:-1]))]
        if not gone:
            raise ConfigError("{path} has no metadata {key}: nothing to remove", path=path, key=key)
        changed = {name: value for name, value in changed.items() if name not in gone}
    for key, value in (values or {}).items():
        if not key.startswith(METADATA_PREFIXES) or key in METADATA_PREFIXES:
            raise ConfigError(
                "{key} is not a key of metadata here: those begin with {prefixes}",
                key=key,
                prefixes=", ".join(METADATA_PREFIXES),
            )
        changed[key] = str(value)
    table = {name: about for name, about in read_raw_header(path)[0].items() if name != "__metadata__"}
    make_space(target, path.stat().st_size)
    report(Message("writing"), 0, 1)
    written = write_atomic(target, lambda place: _copy(path, place, storage.header_bytes(table, changed)))
    report(Message("writing"), 1, 1)
    return written


def _copy(source: Path, target: Path, header: bytes) -> None:
    """Copy the data of `source` after another header, and check its length."""
    with source.open("rb") as old, target.open("xb") as new:
        start = 8 + int.from_bytes(old.read(8), "little")  # the first 8 bytes are the length of the header
        old.seek(start)
        new.write(header)
        shutil.copyfileobj(old, new, 1 << 22)
        if new.tell() - len(header) != source.stat().st_size - start:
            raise OSError(f"{source} changed while it was read")
