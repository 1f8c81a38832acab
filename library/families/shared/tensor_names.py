"""Names of tensors in checkpoints: prefixes of other programs, and tables for renaming."""

import re
from collections.abc import Iterable, Mapping, Sequence

# Prefixes of a denoiser's names in files of other programs.
DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "transformer.")
COMPILE_PREFIX = "_orig_mod."  # of torch.compile, which other tools leave in the names


def denoiser_prefix(names: Iterable[str]) -> str:
    """Return the prefix of a denoiser's names in a file, or ""; it may combine those of two programs."""
    names, outer = list(names), ""
    while True:
        unprefixed = [name.removeprefix(outer) for name in names if name.startswith(outer)]
        candidates = (prefix for prefix in DENOISER_PREFIXES if any(name.startswith(prefix) for name in unprefixed))
        if not (inner := next(candidates, "" if outer else shared_prefix(names))):
            return outer
        outer += inner


def shared_prefix(names: Sequence[str]) -> str:
    """Return the common prefix of all names, such as "module." or "model." of unknown programs.

    A list of blocks is part of the network and not a prefix, even if a file holds nothing else.
    """
    shared: list[str] = []
    for words in zip(*(name.split(".") for name in names), strict=False):
        if any(word.isdecimal() for word in words):
            shared = shared[:-1]  # the name of the list
            break
        if len({*words}) > 1:
            break
        shared.append(words[0])
    return "".join(f"{word}." for word in shared) if len(names) > 1 else ""


def without_prefix(names: Iterable[str]) -> dict[str, str]:
    """Keys of a denoiser's file -> {plain key: key in the file}.

    Without the prefix of torch.compile and of other programs; in a file with a prefix, tensors without it (text
    encoders, VAE) are skipped.
    """
    plain = {name.replace(COMPILE_PREFIX, ""): name for name in names}
    prefix = denoiser_prefix(plain)
    return {name.removeprefix(prefix): key for name, key in plain.items() if name.startswith(prefix)}


def count_list_blocks(names: Iterable[str], blocks: str) -> int:
    start = f"{blocks}."
    return len({name.removeprefix(start).partition(".")[0] for name in names if name.startswith(start)})


def replace_prefix(name: str, table: Mapping[str, str]) -> str:
    """Replace the longest prefix of a dotted name that is in the table; return the name unchanged if none is."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        replacement = table.get(".".join(parts[:length]))
        if replacement is not None:
            return ".".join([replacement, *parts[length:]])
    return name


def rename_path(path: str, in_block: re.Pattern[str], outside: Mapping[str, str], inside: Mapping[str, str]) -> str:
    """Rename a dotted path by prefixes: that of a block by `outside`, and what follows in the block by `inside`.

    `in_block` matches paths inside blocks, with the block and the rest as its groups.
    """
    match = in_block.fullmatch(path)
    if not match:
        return replace_prefix(path, outside)
    return f"{replace_prefix(match[1], outside)}.{replace_prefix(match[2], inside)}"


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """Return the inverse of a table of names. Raises ValueError if two names of the table have the same target."""
    back = {new: old for old, new in table.items()}
    if len(back) != len(table):
        raise ValueError("two names of the table become the same")
    return back


def after_prefix(names: Iterable[str], marks: Iterable[str]) -> dict[str, str]:
    """Return {name without the file's prefix: name}, for names with the prefix before one of `marks`."""
    names, marks = [*names], [*marks]
    prefix = next((name.removesuffix(mark) for name in names for mark in marks if name.endswith(mark)), "")
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
