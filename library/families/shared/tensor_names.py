"""Names of tensors in checkpoints: the prefixes that other programs put before them, and tables that rename them."""

from collections.abc import Iterable, Mapping, Sequence

# What the names of a denoiser begin with in files that other programs write.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "transformer.")
COMPILED = "_orig_mod."  # torch.compile's wrapper, which other tools leave in the names


def prefix_of(names: Iterable[str]) -> str:
    """What the names of a denoiser begin with in a file, "" for nothing; two programs may each have wrapped it."""
    names, found = list(names), ""
    while True:
        inside = [name.removeprefix(found) for name in names if name.startswith(found)]
        known = (prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in inside))
        if not (inner := next(known, "" if found else shared_prefix(names))):
            return found
        found += inner


def shared_prefix(names: Sequence[str]) -> str:
    """What all names begin with, as programs of which nothing is known wrap a network: "module.", "model.".

    A list of blocks is part of the network, also where a file holds nothing else.
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

    Without the wrapper that compilation leaves, and without a prefix; where the file has one, what lies outside of it
    (text encoders, VAE) is left out.
    """
    plain = {name.replace(COMPILED, ""): name for name in names}
    prefix = prefix_of(plain)
    return {name.removeprefix(prefix): key for name, key in plain.items() if name.startswith(prefix)}


def renamed(name: str, table: Mapping[str, str]) -> str:
    """A dotted name with its longest beginning that the table knows replaced; unchanged when it knows none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        found = table.get(".".join(parts[:length]))
        if found is not None:
            return ".".join([found, *parts[length:]])
    return name


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """A table of names read the other way; raises ValueError when two names would become one."""
    back = {new: old for old, new in table.items()}
    if len(back) != len(table):
        raise ValueError("two names of the table become the same")
    return back
