"""Configs as files: the presets of the project, and the user's own."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_gui.server import paths
from library import importers
from library.config.building import Layer, build, read_layers
from library.config.fixes import carried
from library.config.formats import read_toml, to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted
from library.config.run_config import RunConfig
from library.config.schema import changed, flat, options, values
from library.config.values import Option
from library.families import RUNS, config_class
from library.files import clear_errors, write_atomic
from library.optim import names
from library.recipes.preset_files import Preset, profiles

# Options that presets leave alone: paths, names, and accounts.
OWN_KINDS, OWN_SECTIONS = ("file", "folder", "secret"), ("metadata", "hub", "log")
OWN_NAMES = ("output_name", "model_version", "token_string", "init_word")


UNDONE = {"cpu_offload_checkpointing"}  # options outside the compile section that one profile sets and others undo
# Options to reset, in this order, if a profile and the other settings exclude each other.
YIELDING = ("checkpoint_keep_attention", "compile_mode", "compile_blocks", "cpu_offload_checkpointing")


def apply(preset: Preset, config: type, now: JsonMapping, notes: list[MessageLike] | None = None) -> Any:
    """A preset on top of the defaults, with the paths and names of `now` kept.

    A profile keeps more: all options except those of compiling, so that a training that fits into the GPU's memory
    still fits. What it cannot combine with the rest, it leaves out. If the package of the preset's optimizer does not
    work here, the nearest optimizer that does replaces it. `notes` say so.
    """
    known = options(config)
    if preset.is_profile:
        kept = {
            name: now[name] for name in known.keys() & now if name not in UNDONE and not is_of_compiling(known[name])
        }
        return _laid_over(kept, read_toml(preset.path), config, notes)
    kept = {name: value for name, value in now.items() if name in known and is_own(known[name])}
    return build(config, {**kept, **_that_works(read_toml(preset.path), notes)}, preset.path.name, notes=[])


def _laid_over(kept: JsonObject, profile: JsonObject, config: type, notes: list[MessageLike] | None) -> Any:
    """Values with a profile on top. Mistakes in the values alone do not prevent applying it."""
    given, stood = {**kept, **profile}, set(read_layers(config, [Layer(kept)]).problems)
    while True:
        reading = read_layers(config, [Layer(given)])
        found = [problem for problem in reading.problems if problem not in stood]
        if not found:
            return reading.config
        less = next((name for name in YIELDING if name in given and name in found[0].options), None)
        if less is None:
            raise ConfigError(*found)
        del given[less]
        if notes is not None:
            notes.append(Message("{profile} is left out: {why}", profile=less, why=found[0]))


def _that_works(found: JsonObject, notes: list[MessageLike] | None) -> JsonObject:
    wanted = str(found.get("optimizer_type", ""))
    if not wanted or not (why := names.package_problem(wanted)):
        return found
    other = names.nearest(wanted)
    if notes is not None:
        notes.append(
            Problem("optimizer_type", "is {other} here, as {wanted} {why}", other=other, wanted=wanted, why=why)
        )
    kept = carried(found.get("optimizer_args", ()))
    return {**found, "optimizer_type": other, **({"optimizer_args": list(kept)} if "optimizer_args" in found else {})}


def chosen_profile(config: RunConfig) -> str:
    """The id of the profile that a config compiles by: the one that would change nothing. "" if there is none, or
    compiling is off."""
    if not (config.compile.compile or config.compile.compile_autotune):
        return ""
    known, now = options(type(config)), values(config)
    compiling = {name for name, option in known.items() if is_of_compiling(option)}
    for preset in profiles():
        given = read_toml(preset.path)
        touched = given.keys() | compiling | UNDONE
        if given and all(
            now[name] == (known[name].read(given[name]) if name in given else known[name].default) for name in touched
        ):
            return preset.id
    return ""


def fitting(path: Path, configs: Mapping[str, type], family: str, roots: Sequence[Path]) -> importers.Imported:
    """Convert a config file like `kohya import`, to one of these families.

    A file that does not name its family gets the one on screen, `family`, unless another fits better. Raises
    ConfigError for files that cannot be parsed, and for another kind of training.
    """
    made = imported(path, configs, family, roots)
    if type(made.config) not in configs.values():
        raise ConfigError(
            "config file: {name} is for {title} ({trainer})",
            name=path.name,
            title=made.config.title,
            trainer=made.trainer,
        )
    return made


def report(made: importers.Imported) -> list[MessageLike]:
    """What became of the keys of a config file, and its problems."""
    if made.program == importers.FLAT:
        return made.lines()
    template = "Imported from {trainer}: {keys} kept as they are." if made.of("kept") else "Imported from {trainer}."
    return [Message(template, trainer=made.trainer, keys=counted(len(made.of("kept")), "key")), *made.lines()]


def imported(path: Path, configs: Mapping[str, type], family: str, roots: Sequence[Path]) -> importers.Imported:
    """Convert a config file like `kohya import`. If it fits several trainings, the result is one of `configs`,
    preferably of the family on screen. Files that it names are only read below `roots`. Raises ConfigError with file
    names without their folders, which an upload does not have."""
    preferred = [configs[name].script for name in sorted(configs, key=lambda name: name != family)]
    try:
        runs = {script: config_class(script) for script in RUNS}
        return importers.load(path, runs, preferred=preferred, may_read=readable_below(roots))
    except ConfigError as error:
        shorter = (one.replaced(path=path.name) if "path" in one.arguments else one for one in error.problems)
        raise ConfigError(*shorter) from None


def readable_below(roots: Sequence[Path]) -> Callable[[Path], bool]:
    """A test for files that a config names: whether the page may read them."""

    def may_read(path: Path) -> bool:
        try:
            return bool(paths.inside(str(path), roots))
        except ConfigError:
            return False

    return may_read


def base(path: Path, roots: Sequence[Path]) -> JsonObject:
    """The fields of a kohya_ss JSON, which an export keeps if they mean nothing here; {} for other files."""
    found = importers.parse(path)
    if path.suffix.lower() != ".json" or not importers.of_others(found):
        return {}
    made = importers.load(path, {script: config_class(script) for script in RUNS}, may_read=readable_below(roots))
    return found if made.trainer.startswith("kohya_ss") else {}


def seen(path: Path) -> str:
    """A hash of a file's contents, which changes if another visitor or program edits it."""
    return f"{path}\n{hashlib.sha256(path.read_bytes()).hexdigest()}"


def save_config(path: Path, config: RunConfig, known: str) -> int:
    """Save a config. Returns the number of its options. An existing file is only overwritten if it was opened here, and
    has not changed since it was `seen`."""
    if path.exists() and known.partition("\n")[0] != str(path):
        raise ConfigError(
            "config file: {path} exists already; load it first to write over it, or choose another name", path=path
        )
    if path.exists() and known != seen(path):
        raise ConfigError(
            "config file: {path} was changed elsewhere meanwhile; load it again, or choose another name", path=path
        )
    with clear_errors(path):
        write_atomic(path, to_toml(config, comment(config)))
    return len(flat(changed(config)))


def comment(config: RunConfig) -> str:
    """The first line of a config file that the page saves."""
    return f"{config.title}: accelerate launch sd-scripts/{config.script}.py --config_file THIS_FILE"


def suggestion(config: RunConfig) -> str:
    """The default path of a config: beside its result."""
    if not config.save.output_dir:
        raise ConfigError("config file: write where to save it, such as ~/kohya/cat.toml")
    return os.path.join(config.save.output_dir, f"{config.save.output_name or config.script}.toml")


def is_of_compiling(option: Option) -> bool:
    """Whether an option belongs to compiling."""
    return option.section == "compile" and option.kind != "folder"


def is_own(option: Option) -> bool:
    """Whether an option is personal, so that presets leave it alone: places, names, accounts."""
    return option.kind in OWN_KINDS or option.section in OWN_SECTIONS or option.name in OWN_NAMES
