"""Import flat TOML files of sd-scripts: current option names, and old ones or those of forks."""

from collections.abc import Iterable

from library.config import building, schema
from library.config.converted import OLD_BLOCKS, blocks
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Problem, listed
from library.config.run_config import of_told_kind
from library.config.schema import options
from library.config.values import did_you_mean
from library.importers.builder import Configs, ImportBuilder, is_empty
from library.importers.shared import ONLY, load_tables

TRAINER = "sd-scripts"


def read(found: JsonMapping, configs: Configs, script: str = "") -> ImportBuilder:
    """Every key of a flat file -> our values and its outcome."""
    found = schema.flat(found)
    _refuse(found, configs, script)
    builder = ImportBuilder(found, script or script_of(found, configs), TRAINER, keeps_ineffective=True)
    aliases = configs[builder.script].aliases
    for key, value in found.items():
        if value is None or value == "":
            builder.empty(key)
        elif key == "torch_compile":
            said = "is compile, which compiles block by block and leaves the saved names alone"
            builder.change(key, said, {"compile": value})
        elif key in OLD_BLOCKS and builder.family == "flux":
            old_blocks(builder, OLD_BLOCKS, given=builder.get("blocks_to_swap") is not None)
        elif key in aliases:
            builder.rename(key, aliases[key])
        else:
            builder.keep(key)
    return builder


def old_blocks(builder: ImportBuilder, keys: Iterable[str], given: bool) -> None:
    """Map old keys to blocks_to_swap; `given`: the file has that option as well."""
    unreadable: list[Problem] = []
    here = {key: builder.source[key] for key in keys if builder.get(key) is not None}
    old = building.read_section(OLD_BLOCKS, building.Layer(here), unreadable)
    values, problems = blocks(old, given)
    said = listed(problems, "; ")
    for key in here:
        if old.get(key) and values:
            builder.change(key, said, values)
        else:
            builder.ignore(key, said if key in old else listed(unreadable, "; "))


def _refuse(found: JsonMapping, configs: Configs, script: str) -> None:
    """Raise ConfigError for anything but a training of a supported model."""
    tables = load_tables("sd_scripts")
    other = next((what for key, what in tables["other_keys"].items() if not is_empty(found.get(key))), "")
    if other := other or tables["other_modules"].get(str(found.get("network_module") or "")):
        raise ConfigError("this file of {trainer} is for {other}, which is not trained here: use {trainer}; {advice}",
            trainer=TRAINER, other=other, advice=ONLY)  # fmt: skip
    names = {name for config in configs.values() for name in (*options(config), *config.aliases, *config.foreign)}
    if names.isdisjoint(found) and (found or not script):
        near = (listed([f": {name}", hint], "") for name in found if (hint := did_you_mean(name, names)))
        raise ConfigError("no setting of any training is in this file{hint}", hint=next(near, ""))


def script_of(found: JsonMapping, configs: Configs) -> str:
    """The script whose options include most of the keys. Raises ConfigError when that is ambiguous."""
    fit = {script: len(found.keys() & options(config).keys()) for script, config in configs.items()}
    best = max(fit.values(), default=0)
    fitting = [script for script, count in fit.items() if count == best]
    if len(fitting) > 1:
        # FLUX.1 needs options for its own files, so a file without any of them is for SDXL.
        fitting = [script for script in fitting if script.startswith("sdxl")] or fitting
    if len(fitting) > 1:
        fitting = [*of_told_kind(found, {script: configs[script] for script in fitting})] or fitting
    if len(fitting) > 1:
        raise ConfigError(
            "this file names no training script; choose it with --script: {fitting}", fitting=", ".join(fitting)
        )
    return fitting[0]
