"""The command for the training on screen: its config file matches the form, or the page offers to save it first."""

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kohya_gui.form import messages, presets
from kohya_gui.server import named_paths, paths
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.building import build_config
from library.config.command import quote_command, training_command
from library.config.formats import to_toml
from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_toml, parse_toml
from library.config.pasted import expand_home, strip_pasted
from library.config.problems import ConfigError, Message, MessageLike
from library.config.run_config import RunConfig
from library.config.schema import flatten_sections, option_values, options_of
from library.config.values import Option
from library.families import config_class
from library.runs import keys


class CommandPrinter:
    """Handlers for printed commands."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"keep": self.keep}

    def keep(self, request: ApiRequest) -> JsonObject:
        """Save the config of a printed command to its file, which must not exist yet."""
        path = paths.config_file(request.text("path"), self.roots)
        try:
            values = flatten_sections(parse_toml(request.text("toml"), path.name))
        except ConfigError:
            raise ConfigError("These settings cannot be read: press Print command again.") from None
        config = build_config(config_class(request.text("script")), values, path.name, notes=[])
        if not trains_same(path, config):
            presets.save_config(path, config, "")
        return {"said": Message("Saved {path}.", path=path)}


def printed(
    config: RunConfig, where: str, launch: JsonMapping, notes: Sequence[MessageLike], roots: Sequence[Path]
) -> str:
    """Return the command, its config, and whether the config is in its file already. Nothing is written."""
    path, is_there = standing(config, where, roots)
    line = quote_command(training_command(path, config.script, **launch))
    remarks = [*notes, *surroundings(config)]
    return messages.command_html(
        line, to_toml(config, presets.comment(config)), (path, config.script, is_there), remarks
    )


def standing(config: RunConfig, where: str, roots: Sequence[Path]) -> tuple[Path, bool]:
    """Return the file for a command to name, and whether it exists with exactly this config; otherwise its name is
    free.

    `where` is the file that was last loaded or saved, or a typed path; if empty, the file is beside the result.
    """
    named = strip_pasted(where)
    try:
        path = paths.config_file(named or str(presets.usual_path(config)), roots)
    except ConfigError:
        if named:
            raise
        return presets.usual_path(config).absolute(), False  # out of the page's reach
    first = path
    for number in count(2):
        if not os.path.lexists(path):
            return path, False
        if trains_same(path, config):
            return path, True
        path = first.with_name(f"{first.stem}-{number}{first.suffix}")
    raise AssertionError("numbers do not end")


def trains_same(path: Path, config: RunConfig) -> bool:
    """Return whether this script with this file would train exactly this config. Tokens do not count."""
    try:
        if path.stat().st_size > paths.MAX_CONFIG_BYTES:
            return False
        saved = build_config(type(config), flatten_sections(load_toml(path)), path.name, notes=[])
    except (ConfigError, OSError):
        return False
    return _open(saved) == _open(config)


def _open(config: RunConfig) -> JsonObject:
    options = options_of(type(config))
    return {name: value for name, value in option_values(config).items() if options[name].kind != "secret"}


def surroundings(config: RunConfig) -> list[Message]:
    """Return notes about what Train provides and a shell needs: the base folder of relative paths, and tokens."""
    options = options_of(type(config))
    relative = [name for name, value in option_values(config).items() if _is_relative(options[name], value)]
    template = "Run it in {folder}: the path of {options} is relative to it."
    if len(relative) > 1:
        template = "Run it in {folder}: the paths of {options} are relative to it."
    notes = [Message(template, folder=Path.cwd(), options=", ".join(relative))] if relative else []
    used = {
        "wandb_api_key": config.log.log_with in ("wandb", "all"),
        "huggingface_token": config.hub.huggingface_repo_id,
    }
    secrets = {**keys.stored_keys(), **keys.keys_of_config(config)}
    variables = [keys.ENVIRONMENT[name] for name, value in secrets.items() if value and used[name]]
    return notes + [Message("Set {name} in that shell: tokens are in no config.", name=name) for name in variables]


def _is_relative(option: Option, value: Any) -> bool:
    """Return whether a path is relative to the current folder; an id of Hugging Face is not."""
    text = option.path_in(value or "")
    if option.kind not in ("file", "folder") or not text or os.path.isabs(expand_home(text)):
        return False
    return not named_paths.is_hub_id(option, text)
