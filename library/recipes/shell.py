"""`kohya preset`: list presets, or build a config from a preset, a purpose and a number of images."""

import sys
from pathlib import Path
from typing import Any

from library.config.arguments import Arguments
from library.config.building import build_config
from library.config.command import quote_command
from library.config.formats import read_toml, to_toml
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, either, raise_if_any
from library.config.schema import changed, flatten_sections, options_of
from library.data import finding
from library.families import RUNS, config_class
from library.files import write_atomic
from library.recipes import preset_files, recipe_files
from library.recipes.preset_files import Preset
from library.recipes.recipe_files import PURPOSES, Recipe

EXIT_DONE = 0
AS_MODEL = ("model_type", "model_version")  # what --model may name


def main(argv: list[str]) -> int:
    """List the presets, or print or write one as a config. Returns 0; raises ConfigError for unknown ones."""
    parser = Arguments(
        "kohya preset",
        description="Without a name: list the presets. With one: print it as a TOML config, with the learning rate, "
        "alpha and steps that suit a purpose and the number of your images.",
    )
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="a name from that list")
    parser.add_argument(
        "--purpose", choices=list(PURPOSES), help="what the training is for (default: the first that fits)"
    )
    parser.add_argument("--model", metavar="NAME", help="a model of the family, such as turbo or klein-base-9b")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="the folder of your images, which goes into the config"
    )
    parser.add_argument("--images", type=int, metavar="N", help="the number of your images, if you do not name --data")
    parser.add_argument("-o", "--output", type=Path, help="where to write; an existing file is never overwritten")
    arguments = parser.parse_args(argv)
    if arguments.data and arguments.images is not None:
        parser.error("--images goes without --data, whose images are counted")
    if arguments.images is not None and arguments.images < 1:
        parser.error("--images is the number of your images: write 1 or more")
    if not arguments.preset:
        print(
            "\n".join(
                f"{preset.id:<28} {preset.sentence}" for preset in preset_files.all_presets() if not preset.is_profile
            )
        )
        return EXIT_DONE
    preset = find_preset(arguments.preset)
    options: JsonObject = {
        **model_option(preset, arguments.model),
        **({"train_data_dir": str(arguments.data)} if arguments.data else {}),
    }
    config, notes = with_recipe(preset, options, arguments.purpose or "", arguments.images or 0)
    comment = f"{config.title}: accelerate launch sd-scripts/{config.script}.py --config_file THIS_FILE"
    text = to_toml(config, comment)
    if arguments.output:
        write_new_config(arguments.output, text)
        notes.append(
            f"wrote {arguments.output}; train with: {quote_command(['kohya', 'train', str(arguments.output)])}"
        )
    else:
        print(text, end="")
    for note in notes:
        print(note, file=sys.stderr)
    return EXIT_DONE


def find_preset(name: str) -> Preset:
    """Return a preset by its id or its file."""
    path = name.replace("\\", "/").removesuffix(".toml")
    preset = preset_files.by_id("/".join(path.split("/")[-2:]))
    if preset is None or preset.is_profile:
        raise ConfigError("There is no preset {name}: kohya preset lists all of them", name=name)
    return preset


def script_class(preset: Preset) -> Any:
    """Return the config class that a preset is for."""
    return next(
        config for config in map(config_class, RUNS) if (config.family, config.kind) == (preset.family, preset.kind)
    )


def model_option(preset: Preset, name: str | None) -> JsonObject:
    """Return the option that names a model of the preset's family."""
    if not name:
        return {}
    options = options_of(script_class(preset))
    fitting = [option for option in AS_MODEL if option in options and name in options[option].choices]
    if not fitting:
        models = [str(choice) for option in AS_MODEL if option in options for choice in options[option].choices]
        if not models:
            raise ConfigError("--model: {preset} has one model only, so leave it out", preset=preset.id)
        raise ConfigError(
            "--model: {preset} knows no {name}; write one of {models}",
            preset=preset.id,
            name=name,
            models=either(models),
        )
    return {fitting[0]: name}


def with_recipe(preset: Preset, options: JsonObject, purpose: str, images: int) -> tuple[Any, list[MessageLike]]:
    """Return a preset with other values and the recipe for a purpose, and remarks on it."""
    kind = script_class(preset)
    config = build_config(kind, {**read_toml(preset.path), **options}, preset.path.name, notes=[])
    recipe = recipe_files.choose_recipe(config, purpose)
    if recipe is None:
        return config, []
    _check_purpose(preset, recipe_files.fitting_recipes(config), purpose)
    values = {**flatten_sections(changed(config)), **recipe.options}
    if options.get("train_data_dir"):
        survey = finding.survey_data(config, keep=False)
        raise_if_any(survey.problems)
        images = sum(not image.is_reg for image in survey.images.items)
    notes: list[MessageLike] = (
        [] if not recipe.purpose else [Message("Purpose: {purpose}.", purpose=Message(PURPOSES[recipe.purpose]))]
    )
    if images > 0:
        images_per_step = config.data.train_batch_size * config.steps.gradient_accumulation_steps
        proposal = recipe_files.proposed_steps(recipe, images, images_per_step)
        values |= recipe_files.options_of_length(proposal, values)
        notes.append(proposal.reason)
    return build_config(kind, values, preset.path.name, notes=[]), notes


def _check_purpose(preset: Preset, fitting: list[Recipe], purpose: str) -> None:
    purposes = [recipe.purpose for recipe in fitting if recipe.purpose]
    if purpose and not purposes:
        raise ConfigError("--purpose: {preset} is for any purpose, so leave it out", preset=preset.id)
    if purpose and purpose not in purposes:
        raise ConfigError(
            "--purpose: {preset} is for {purposes}, not for {purpose}",
            preset=preset.id,
            purposes=either(purposes),
            purpose=purpose,
        )


def write_new_config(path: Path, text: str) -> None:
    """Write a config into a file that must not exist yet."""
    if path.exists():
        raise ConfigError(Problem("", "{path} exists already; name another file, or delete it first", path=path))
    write_atomic(path, text)
