"""Names of tensors in checkpoints: prefixes of other programs, and tables for renaming."""

from collections.abc import Iterable, Mapping, Sequence

# Prefixes of a denoiser's names in files of other programs.
DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "transformer.")
COMPILE_PREFIX = "_orig_mod."  # of torch.compile, which other tools leave in the names


def denoiser_prefix(names: Iterable[str]) -> str:
    """The prefix of a denoiser's names in a file, or ""; it may combine those of two programs."""
    names, found = list(names), ""
    while True:
        inside = [name.removeprefix(found) for name in names if name.startswith(found)]
        known = (prefix for prefix in DENOISER_PREFIXES if any(name.startswith(prefix) for name in inside))
        if not (inner := next(known, "" if found else shared_prefix(names))):
            return found
        found += inner


def shared_prefix(names: Sequence[str]) -> str:
    """The common prefix of all names, such as "module." or "model." of unknown programs.

    A list of blocks is part of the network and not a prefix, even if a file holds nothing else.
    """
    shared: list[str] = []
    for words in zip(*(name.split(".") for name in names), strict=False):
        if any(word.isdecimal() for word in words):
            shared = shared[:-1]
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


def replace_prefix(name: str, table: Mapping[str, str]) -> str:
    """A dotted name with its longest prefix in the table replaced; unchanged without one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        found = table.get(".".join(parts[:length]))
        if found is not None:
            return ".".join([found, *parts[length:]])
    return name


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """The inverse of a table of names; raises ValueError when it is not injective."""
    back = {new: old for old, new in table.items()}
    if len(back) != len(table):
        raise ValueError("two names of the table become the same")
    return back
