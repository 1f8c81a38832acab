"""Read SimpleTuner's config.env, whose settings are variables of a shell; nothing in it is run."""

import re
from collections.abc import Iterator
from pathlib import Path

from library.config.json_types import JsonObject
from library.config.outside_files import read_settings_text
from library.config.problems import ConfigError
from library.config.values import split_words
from library.importers.command_line import ASSIGNED, MAX_COMMAND_BYTES, fill_variables, flag_value, flags_of
from library.importers.simpletuner import TRAINER, recognises

ENV_SUFFIX = ".env"
ADDED = re.compile(r"^(?P<start>\s*(?:export\s+)?)(?P<name>[A-Za-z_]\w*)\+=\s*(?P<quote>[\"']?)")
MORE_FLAGS = ("TRAINER_EXTRA_ARGS", "TRAINER_EXTRA_ARGS_LIST")
MAX_VARIABLES = 1000


def read_env(path: Path) -> JsonObject:
    """Return the variables of a file by name, and the flags that it adds. Raises ConfigError unless they are settings
    of SimpleTuner.
    """
    file = read_settings_text(path, MAX_COMMAND_BYTES)
    variables: dict[str, str] = {}
    for name, value in _assigned(file.text, variables):
        variables[name] = value
        if len(variables) > MAX_VARIABLES:
            break
    file.refuse_unclear(variables, path)
    more = [variables.pop(name) for name in MORE_FLAGS if name in variables]
    flags = flags_of([word for text in more for word in split_words(text)])
    settings: JsonObject = {name: value for name, value in variables.items() if value}
    settings |= {f"--{name}": flag_value(words) for name, words in flags.items() if name}
    if not recognises(settings):
        template = (
            "{path} has no settings of {trainer} (MODEL_FAMILY, MODEL_TYPE): import the config.json or config.toml of "
            "this training"
        )
        raise ConfigError(template, path=path, trainer=TRAINER)
    return settings


def _assigned(text: str, variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable with its value, in which those before it are filled in."""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        is_added = ADDED.match(line)
        plain = ADDED.sub(r"\g<start>\g<name>=\g<quote>", line) if is_added else line
        if match := ASSIGNED.match(plain):
            value = fill_variables(match["double"] or match["single"] or match["bare"] or "", {**variables})
            before = variables.get(match["name"], "") if is_added else ""
            yield match["name"], f"{before} {value}".strip()
