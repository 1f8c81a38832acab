"""Read the command that starts a training, as it is pasted from a guide or kept in a script of a shell, as settings."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from library.config.json_types import JsonObject
from library.config.outside_files import parse_toml, read_settings_text
from library.config.problems import ConfigError, Message, MessageLike, option_name, option_values
from library.config.values import quoted, split_words
from library.importers import musubi
from library.importers.kohya_launch import KEYS, PLACE, THREADS, read_launch_settings
from library.importers.lora_scripts_launcher import fill_launcher
from library.importers.shared import load_tables, other_model_error

# What guides write, which changes nothing.
USUAL = {"num_processes": ("1",), "num_machines": ("1",), "num_cpu_threads_per_process": ("1", str(THREADS))}
SUFFIXES = (".sh", ".bat", ".cmd", ".ps1", ".txt")
OTHERS = load_tables("command_line")["other"]
MAX_COMMAND_BYTES = 64 * 1024  # of a script with a command
MAX_LETTERS = 4096  # of a word
SETTINGS_FILES = (".toml", ".yaml", ".yml", ".json")  # that scripts of other programs are started with
CONTINUED = re.compile(r"(?:(?<=\s)[\\^`]|[\\^`](?=[ \t]*\n[ \t]*--))[ \t]*\n[ \t]*")
COMMENT = re.compile(r"\s*(#|::|//|```|rem\s)", re.IGNORECASE)
ASSIGNED = re.compile(
    r"""\s*(?:export\s+|set\s+"?|\$)?(?P<name>[A-Za-z_]\w*)\s*(?<!\+)=\s*"""
    r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[^\s"'#;()]+))"?\s*(?:\#.*|;)?$""",
    re.IGNORECASE,
)
COMPUTED = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")  # up to three brackets deep
VARIABLE = re.compile(r"\$\{(?P<braced>\w+)\}|\$(?P<plain>[A-Za-z_]\w*)|%(?P<percent>[A-Za-z_]\w*)%")
ELLIPSIS = re.compile(r"\([^()]{0,80}\.\.\.[^()]{0,80}\)|(?<=\s)(\.\.\.|…)(?=\s|$)")  # of guides, for more flags
TRAINS = re.compile(r"(train\w*|fine_tune|\brun)\.py|kohya train")
LAUNCHER = re.compile(r"accelerate(?:\.commands\.launch| launch)\s")
OPEN = re.compile(r"\$\{|\$\(|\$[A-Za-z_]|@[A-Za-z_]\w*$|%[A-Za-z_]\w*%")  # what is only known when the script runs


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """A command that trains: our script, its flags, and sentences about what is not one of them."""

    script: str
    flags: JsonObject
    notes: tuple[MessageLike, ...]
    launch: JsonObject  # values of `Launch`


def is_command(text: str) -> bool:
    """Return whether a text is a command with flags that trains, and no TOML."""
    if len(text) > MAX_COMMAND_BYTES:
        return False
    try:
        parse_toml(text, "")
    except ConfigError:
        with contextlib.suppress(ConfigError):  # a launcher of a model that is not trained here is a command, too
            text = fill_launcher(text, _read_variables(text))
        return any(_script_at(words) is not None for words in _lines_of_words(text))
    return False


def read_command(path: Path) -> TrainingCommand:
    """Return the training that a script of a shell starts; the first if there are several. Raises ConfigError if there
    is none, and for those of unsupported models and other programs."""
    file = read_settings_text(path, MAX_COMMAND_BYTES)
    text = file.text
    variables = _read_variables(text)
    text = fill_launcher(text, variables)
    commands = []
    for words in _lines_of_words(text):
        filled = [fill_variables(word, variables) for word in words]
        # A variable alone may be a flag, or nothing at all.
        kept = [word for word, before in zip(filled, words, strict=True) if word or not VARIABLE.fullmatch(before)]
        if (at := _script_at(kept)) is not None:
            commands.append((kept, at))
    if not commands and (word := _chosen_later(text, variables)):
        template = "{path} chooses its script when it runs ({word}): save the command that it starts, and import that"
        raise ConfigError(template, path=path, word=word)
    if not commands:
        template = "{path} has no command that starts a training: a script such as {script} with its --flags"
        raise ConfigError(template, path=path, script="sdxl_train_network.py")
    words, at = commands[0]
    file.refuse_unclear(words, path)
    notes: list[MessageLike] = []
    if len(commands) > 1:
        template = "several commands in this file train; only the first is imported ({script})"
        notes.append(Message(template, script=_stem(words[at])))
    script, arguments = _stem(words[at]), words[at + 1 :]
    _refuse_others(script, arguments)
    flags = _known_flags(arguments, notes)
    if stray := [word for word in flags_of(arguments).get("", ()) if not OPEN.search(word)]:
        notes.append(Message("left out, as it belongs to no --flag: {words}", words=" ".join(stray)))
    launcher = _known_flags(words[:at], notes)
    if "dit" in flags and "mixed_precision" in launcher:  # musubi-tuner trains in the launcher's where it has none
        flags.setdefault("mixed_precision", launcher["mixed_precision"])
    _note_launcher(launcher, flags, notes)
    return TrainingCommand(musubi.our_script(script), flags, tuple(notes), read_launch_settings(launcher))


def flags_of(words: Iterable[str]) -> dict[str, list[str]]:
    """Collect flags with their values, the last of each; under "" the words that belong to none."""
    values_by_flag: dict[str, list[str]] = {}
    current = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values_by_flag[name] = [value] if equals else []
            current = "" if equals else name  # whose value is complete
        else:
            values_by_flag.setdefault(current, []).append(word)
    return values_by_flag


def flag_value(words: list[str]) -> bool | str | list[str]:
    """Return the value of a flag with these words behind it: True without any."""
    if not words:
        return True
    return words if len(words) > 1 else words[0]


def _lines_of_words(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, over the ends of lines that a shell or a guide continues."""
    lines: list[list[str]] = []
    for line in _without_comments(CONTINUED.sub(" ", _without_comments(text))).splitlines():
        if lines and line.lstrip().startswith("--"):  # continued without a mark, as in a table or a chat
            lines[-1].append(line)
        elif line.strip():
            lines.append([line])
    for line in map(" ".join, lines):
        if ".py" in line or "kohya train" in line:
            joined = COMPUTED.sub(lambda found: re.sub(r"[\s\"']", "", found[0]), ELLIPSIS.sub(" ", line))
            try:
                yield split_words(joined)
            except ConfigError:
                if TRAINS.search(line):
                    raise


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not COMMENT.match(line))


def _read_variables(text: str) -> dict[str, str]:
    """Return the variables that the script sets to one value only; others depend on what it finds when it runs."""
    values_by_name: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := ASSIGNED.match(line):
            value = match["double"] or match["single"] or match["bare"] or ""
            values_by_name.setdefault(match["name"], set()).add(value[:MAX_LETTERS])
    return {name: values.pop() for name, values in values_by_name.items() if len(values) == 1}


def fill_variables(word: str, variables: Mapping[str, str]) -> str:
    """Put the values of variables in their places, also of those in values, while the word stays below a limit."""
    for _ in range(4):
        filled = _fill_once(word, variables)
        if filled is None or filled == word:
            break
        word = filled
    return word


def _fill_once(word: str, variables: Mapping[str, str]) -> str | None:
    """Return a word with values in the places of variables; None if that is too long."""
    parts, end, length = [], 0, 0
    for match in VARIABLE.finditer(word):
        name = match["braced"] or match["plain"] or match["percent"]
        parts += [word[end : match.start()], variables.get(name, match[0])]
        end, length = match.end(), length + len(parts[-2]) + len(parts[-1])
        if length > MAX_LETTERS:
            return None
    filled = "".join([*parts, word[end:]])
    return filled if len(filled) <= MAX_LETTERS else None


def _stem(word: str) -> str:
    return re.split(r"[/\\]", word)[-1].removesuffix(".py")


def _script_at(words: list[str]) -> int | None:
    """Return where the script that trains is in a command; None in others."""
    for at, word in enumerate(words):
        is_ours = at >= 2 and [_stem(before) for before in words[at - 2 : at]] == ["kohya", "train"]
        if (
            (is_ours or TRAINS.search(word) and word.endswith(".py"))
            and not word.startswith("--")
            and len(words) > at + 1
        ):
            return at
    return None


def _chosen_later(text: str, variables: Mapping[str, str]) -> str:
    """Return the variable that a launcher starts, if its value is only known when the script runs; else ""."""
    for line in CONTINUED.sub(" ", text).splitlines():
        launcher = LAUNCHER.search(line)
        started = re.compile(r"(\$\w+)\s+[\"']?[-$@]").search(line, launcher.end()) if launcher else None
        if started and OPEN.search(fill_variables(started[1], variables)):
            return started[1]
    return ""


def _refuse_others(script: str, arguments: list[str]) -> None:
    """Raise ConfigError for a script of another model, and for one whose settings are in a file that it names."""
    for other in OTHERS:
        model = next((model for start, model in other["models"].items() if script.startswith(start)), "")
        if model and script != "sdxl_train_control_net_lllite":
            raise other_model_error(other["trainer"], model)
    values = [word.partition("=")[2] if word.startswith("--") else word for word in arguments]
    named = next((value for value in values if value.lower().endswith(SETTINGS_FILES)), "")
    if script in ("train", "run", "train_remote") and named:
        template = "this command starts another program with the settings of {file}: import that file"
        raise ConfigError(template, file=named)


def _known_flags(arguments: list[str], notes: list[MessageLike]) -> JsonObject:
    """Return the flags whose values stand in the text, and note the others."""
    by_flag = flags_of(arguments)
    unclear = [(name, word) for name, words in by_flag.items() for word in words if OPEN.search(word)]
    unclear_flags = {name for name, _ in unclear}
    if unclear:
        lines = [f"--{name} {quoted(word)}" if name and not _stands_alone(word) else word for name, word in unclear]
        template = "left out, as only the script itself knows it when it runs: {values}"
        notes.append(Message(template, values=", ".join(dict.fromkeys(lines))))
    flags: JsonObject = {}
    for name, words in by_flag.items():
        constant = [word for word in words if not OPEN.search(word)]
        only_alone = all(_stands_alone(word) for word in words if OPEN.search(word))
        if name and (name not in unclear_flags or constant or only_alone):
            flags[name] = flag_value(constant)
    return flags


def _stands_alone(word: str) -> bool:
    """Return whether this is a list of flags that a script composes, and no value of a flag."""
    return bool(re.fullmatch(r"\$\{\w+\[@\]\}|@\w+", word))


def _note_launcher(launcher: JsonObject, flags: JsonObject, notes: list[MessageLike]) -> None:
    """Note the options of `accelerate launch` that choose devices, and a precision that the script does not have."""
    values = {name: str(value) for name, value in launcher.items() if name in KEYS and value not in USUAL.get(name, ())}
    if values:
        text = Message("`accelerate launch` has {values}: {place}", values=option_values(values), place=Message(PLACE))
        notes.append(text)
    if launcher.get("multi_gpu") is True and "num_processes" not in launcher:
        template = "`accelerate launch` has {flag}, which means all GPUs: set {option} to their number"
        notes.append(Message(template, flag="--multi_gpu", option=option_name("num_processes")))
    precision = launcher.get("mixed_precision")
    if (
        isinstance(precision, str)
        and precision != "no"
        and not flags.keys() & {"mixed_precision", "config_file", "model_family"}
    ):
        template = "{option} is an option of `accelerate launch`, which the script does not read: it trains without it"
        notes.append(Message(template, option=option_values({"mixed_precision": precision})))
