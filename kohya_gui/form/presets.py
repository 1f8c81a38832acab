"""Configs as files: the presets of the project, and the user's own."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kohya_gui.form import kept_file
from kohya_gui.server import paths
from library import importers
from library.config.building import Layer, build_config, read_layers
from library.config.commented_toml import to_commented_toml
from library.config.fixes import carried_arguments
from library.config.formats import read_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted, option_name
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.config.values import Option
from library.families import RUNS, config_class
from library.files import write_atomic
from library.optim import names
from library.recipes.preset_files import Preset, profiles

# Options that presets leave alone: paths, names, and accounts.
OWN_KINDS, OWN_SECTIONS = ("file", "folder", "secret"), ("metadata", "hub", "log")
OWN_NAMES = ("output_name", "model_version", "token_string", "init_word")


EXISTS = "exists"  # the code of the problem of a file that Save would replace, with its path and state
UNDONE = {"cpu_offload_checkpointing"}  # options outside the compile section that one profile sets and others undo
# Options to reset, in this order, if a profile and the other settings exclude each other.
YIELDING = (
    "checkpoint_keep_attention",
    "compile_activation_budget",
    "compile_mode",
    "compile_blocks",
    "cpu_offload_checkpointing",
)


def apply(preset: Preset, config: type, now: JsonMapping, notes: list[MessageLike] | None = None) -> Any:
    """Return a preset on top of the defaults, with the paths and names of `now` kept.

    A profile keeps more: all options except those of compiling, and of these the share of activations, so that a
    training that fits into the GPU's memory still fits and gets no slower. Options that conflict with the rest are left
    out. If the package of the preset's optimizer does not work here, the nearest optimizer that does replaces it.
    `notes` explain this.
    """
    options = options_of(config)
    if preset.is_profile:
        kept_values = {
            name: now[name] for name in options.keys() & now if name not in UNDONE and not is_of_profile(options[name])
        }
        return _laid_over(kept_values, read_toml(preset.path), config, notes)
    kept_values = {name: value for name, value in now.items() if name in options and is_own(options[name])}
    return build_config(
        config, {**kept_values, **_with_working_optimizer(read_toml(preset.path), notes)}, preset.path.name, notes=[]
    )


def _laid_over(values: JsonObject, profile: JsonObject, config: type, notes: list[MessageLike] | None) -> Any:
    """Return values with a profile on top. Mistakes in the values alone do not prevent applying it."""
    combined, standing_problems = {**values, **profile}, set(read_layers(config, [Layer(values)]).problems)
    while True:  # leave out one option of YIELDING after the other, until the profile adds no new problem
        reading = read_layers(config, [Layer(combined)])
        new_problems = [problem for problem in reading.problems if problem not in standing_problems]
        if not new_problems:
            return reading.config
        dropped = next((name for name in YIELDING if name in combined and name in new_problems[0].options), None)
        if dropped is None:
            raise ConfigError(*new_problems)
        del combined[dropped]
        if notes is not None:
            notes.append(Message("{profile} is left out: {why}", profile=option_name(dropped), why=new_problems[0]))


def _with_working_optimizer(preset_values: JsonObject, notes: list[MessageLike] | None) -> JsonObject:
    optimizer_name = str(preset_values.get("optimizer_type", ""))
    if not optimizer_name or not (why := names.package_problem(optimizer_name)):
        return preset_values
    other = names.working_optimizer(optimizer_name)
    if notes is not None:
        notes.append(
            Problem("optimizer_type", "is {other} here, as {wanted} {why}", other=other, wanted=optimizer_name, why=why)
        )
    arguments = carried_arguments(preset_values.get("optimizer_args", ()))
    return {
        **preset_values,
        "optimizer_type": other,
        **({"optimizer_args": list(arguments)} if "optimizer_args" in preset_values else {}),
    }


def chosen_profile(config: RunConfig) -> str:
    """Return the id of the profile that matches a config: applying it would change nothing. "" if there is none,
    or compiling is off."""
    if not (config.compile.compile or config.compile.compile_autotune):
        return ""
    options, now = options_of(type(config)), option_values(config)
    compiling = {name for name, option in options.items() if is_of_profile(option)}
    for preset in profiles():
        profile_values = read_toml(preset.path)
        touched = profile_values.keys() | compiling | UNDONE
        if profile_values and all(
            now[name] == (options[name].read(profile_values[name]) if name in profile_values else options[name].default)
            for name in touched
        ):
            return preset.id
    return ""


def import_fitting(path: Path, configs: Mapping[str, type], family: str, roots: Sequence[Path]) -> importers.Imported:
    """Convert a config file like `kohya import`, to one of these families.

    A file that does not name its family gets the one on screen, `family`, unless another fits better. Raises
    ConfigError for files that cannot be parsed, and for another kind of training.
    """
    imported = import_config(path, configs, family, roots)
    if type(imported.config) not in configs.values():
        raise ConfigError(
            "config file: {name} is for {title} ({trainer})",
            name=path.name,
            title=imported.config.title,
            trainer=imported.trainer,
        )
    return imported


def import_notes(imported: importers.Imported) -> list[MessageLike]:
    """Return notes about a config file's keys, and its problems."""
    if imported.program == importers.FLAT:
        return imported.lines()
    template = (
        "Imported from {trainer}: {keys} kept as they are." if imported.of("kept") else "Imported from {trainer}."
    )
    return [
        Message(template, trainer=imported.trainer, keys=counted(len(imported.of("kept")), "key")),
        *imported.lines(),
    ]


def import_config(path: Path, configs: Mapping[str, type], family: str, roots: Sequence[Path]) -> importers.Imported:
    """Convert a config file like `kohya import`. If it fits several trainings, the result is one of `configs`,
    preferably of the family on screen. Files that it names are only read below `roots`. Raises ConfigError with file
    names without their folders, which an upload does not have."""
    preferred = [configs[name].script for name in sorted(configs, key=lambda name: name != family)]
    with without_folders():
        runs = {script: config_class(script) for script in RUNS}
        return importers.import_file(path, runs, preferred=preferred, may_read=readable_below(roots))


@contextmanager
def without_folders() -> Iterator[None]:
    """Shorten the file names in errors to those without folders: an uploaded file is in a temporary one."""
    try:
        yield
    except ConfigError as error:
        shorter = (
            problem.replaced(path=Path(str(problem.arguments["path"])).name) if "path" in problem.arguments else problem
            for problem in error.problems
        )
        raise ConfigError(*shorter) from None


def readable_below(roots: Sequence[Path]) -> Callable[[Path], bool]:
    """Return a test for files that a config names: whether the page may read them."""

    def may_read(path: Path) -> bool:
        try:
            return bool(paths.allowed_path(str(path), roots))
        except ConfigError:
            return False

    return may_read


def base(path: Path, roots: Sequence[Path]) -> JsonObject:
    """Return the fields of a kohya_ss JSON, which an export keeps if they mean nothing here; {} for other files."""
    contents = importers.parse_file(path)
    if path.suffix.lower() != ".json" or not importers.is_foreign_config(contents):
        return {}
    imported = importers.import_file(
        path, {script: config_class(script) for script in RUNS}, may_read=readable_below(roots)
    )
    return contents if imported.trainer.startswith("kohya_ss") else {}


def config_file_state(path: Path) -> str:
    # The hash changes if another visitor or program edits the file.
    return f"{path}\n{hashlib.sha256(path.read_bytes()).hexdigest()}"


def save_config(path: Path, config: RunConfig, opened_state: str, source: str = "") -> int:
    """Save a config, with the comments of the text that it came from. Returns the number of its options. An existing
    file is only overwritten if it was opened here, and has not changed since: `opened_state` is its `config_file_state`
    at that time."""
    if path.exists() and opened_state.partition("\n")[0] != str(path):
        template = "config file: {path} exists already; load it first to write over it, or choose another name"
        raise ConfigError(Problem("", template, path=path, state=config_file_state(path), code=EXISTS))
    if path.exists() and opened_state != config_file_state(path):
        raise ConfigError(
            "config file: {path} has been changed elsewhere; load it again, or choose another name", path=path
        )
    write_atomic(path, to_commented_toml(source, config, comment(config)))
    return len(flatten_sections(changed(config)))


def comment(config: RunConfig) -> str:
    return f"{config.title}: accelerate launch sd-scripts/{config.script}.py --config_file THIS_FILE"


def suggestion(config: RunConfig) -> Path:
    """Return a free path for a config: its usual one, with a number if that is taken."""
    return kept_file.free_path(usual_path(config))


def usual_path(config: RunConfig) -> Path:
    """Return the path of a config beside its result: named after the result, the family and what is trained."""
    if not config.save.output_dir:
        raise ConfigError("config file: write where to save it, such as ~/kohya/cat.toml")
    words = [config.save.output_name or "", config.family, config.kind]
    name = "-".join(word for at, word in enumerate(words) if word and word not in "-".join(words[:at]))
    return Path(os.path.expanduser(config.save.output_dir)) / f"{name}.toml"


def is_of_compiling(option: Option) -> bool:
    return option.section == "compile" and option.kind != "folder"


def is_of_profile(option: Option) -> bool:
    # The share of activations suits the GPU's memory, whatever compiles.
    return is_of_compiling(option) and option.name != "compile_activation_budget"


def is_own(option: Option) -> bool:
    return option.kind in OWN_KINDS or option.section in OWN_SECTIONS or option.name in OWN_NAMES
