"""Choose the training settings and the ways to generate images that `kohya bench` measures."""

from collections.abc import Callable, Sequence

from library.config.problems import ConfigError
from library.measuring.candidates import ALL_NAMES, IMAGE_WAYS, NAMED, OWN_SETTINGS, Candidate, unknown_name

Choose = Callable[[Sequence[str]], list[Candidate]]


def choose_ways(
    names: Sequence[str], choose: Choose, known_ways: Sequence[str], trains: bool
) -> tuple[list[Candidate], list[str]]:
    """Return the settings for steps, and the ways to generate, of the names of --candidate; each part measures its own.

    `choose` returns the settings of some names, `known_ways` are those of this device, and `trains` is whether steps
    are measured, too. Raises ConfigError for names that no part knows, and for a part without a name.
    """
    if not names or [*names] == [ALL_NAMES]:
        return choose(names), [*known_ways]
    ways = [name for name in dict.fromkeys(names) if name in known_ways]
    if not trains:
        if unknown := [name for name in dict.fromkeys(names) if name not in known_ways]:
            why = "is not for generating images"
            raise ConfigError(*(unknown_name(name, known_ways, IMAGE_WAYS, why) for name in unknown))
        return [], ways
    of_steps = [name for name in names if name in NAMED or name == OWN_SETTINGS or name not in known_ways]
    chosen = choose(of_steps) if of_steps else []
    if not chosen or not ways:
        template = "--candidate {names} has no variant for --part {part}; add one of {possible}"
        part, possible = ("sample", known_ways) if chosen else ("step", [candidate.name for candidate in choose([])])
        raise ConfigError(template, names=",".join(names), part=part, possible=", ".join(possible))
    return chosen, ways
