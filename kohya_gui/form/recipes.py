"""The purpose of a training in a form: what a recipe sets on top of the preset."""

import math
import re
from typing import Any

from library.config.building import build_config
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, Problem, counted, join_messages
from library.config.run_config import RunConfig
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.recipes import recipe_files
from library.recipes.recipe_files import MEANT, PURPOSES, Recipe

STEPS = "max_train_steps"
BATCH_OPTIONS = ("train_batch_size", "gradient_accumulation_steps", "num_processes")
MAX_IMAGES = 10**7
REFERENCES = "control_directory"
# Options on top of a form -> the purposes that they are for; "" is a form without a recipe.
OF_PURPOSES = {REFERENCES: {"purpose": ("edit", "")}}


def apply_recipe(
    preset_config: Any, model: RunConfig, purpose: str, images: int, at_once: int
) -> tuple[Any, JsonObject]:
    """Return a preset's config with the recipe for a purpose on top, and its description for the form; without
    `purpose` it is the first that fits. `model` says which model of the family is trained, and how many images were
    counted."""
    recipe = recipe_files.choose_recipe(model, purpose)
    if recipe is None:
        return preset_config, {}
    values = {**flatten_sections(changed(preset_config)), **recipe.options}
    proposal = recipe_files.proposed_steps(recipe, images, at_once) if images else None
    if proposal:
        values |= recipe_files.options_of_length(proposal, values)
    try:
        with_recipe = build_config(type(preset_config), values, notes=[])
    except ConfigError:  # it contradicts the user's settings for the model
        return preset_config, {}
    return with_recipe, {
        "purpose": recipe.purpose,
        "purposes": [
            [other.purpose, PURPOSES[other.purpose]] for other in recipe_files.fitting_recipes(model) if other.purpose
        ],
        "meant": MEANT.get(recipe.purpose, ""),
        "elsewhere": _models_for_purpose(model),
        "sets": _sets(recipe, with_recipe),
        "advice": proposal.reason if proposal else _advice(recipe),
    }


def missing_references(purpose: str, config: RunConfig) -> list[Problem]:
    """Return the problem of an edit without reference images, which would learn the content of its images instead of a
    change. For models that always need references, the check reports it for each folder."""
    sources = (getattr(config.data, name, None) for name in (REFERENCES, "dataset_config", "in_json"))
    use = config.control_images
    if purpose != "edit" or use.least or not use.most or any(sources):
        return []
    template = "is not set: choose the folder of the images before the edit, with the same file names"
    return [Problem(REFERENCES, template)]


def _models_for_purpose(model: RunConfig) -> Message | str:
    """Return the family's models that offer a purpose that this model does not; "" for none."""
    offered = {recipe.purpose for recipe in recipe_files.fitting_recipes(model)}
    for recipe in recipe_files.of_family(model.family)[0]:
        if recipe.kind == model.kind and recipe.when and recipe.purpose not in offered:
            ((name, models),) = recipe.when.items()
            option = options_of(type(model))[name]
            return Message(
                "{purpose}: choose another model first ({models}).",
                purpose=Message(PURPOSES[recipe.purpose]),
                models=join_messages([option.word(value) for value in models]),
            )
    return ""


def _sets(recipe: Recipe, config: RunConfig) -> list[list[str]]:
    options, values = options_of(type(config)), option_values(config)
    return [
        [options[name].label, options[name].word(values[name]) if options[name].choices else _short_value(values[name])]
        for name in recipe.options
        if name != STEPS
    ]


def _short_value(value: Any) -> str:
    """Return a value in a sentence: 16, 0.0002, the last part of a path."""
    if isinstance(value, tuple):
        return ", ".join(re.split(r"[/\\]", str(part))[-1] for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _advice(recipe: Recipe) -> Message:
    fewest, largest_number = recipe.images
    return Message(
        "{least} to {most} images are usual, each seen about {times}.",
        least=fewest,
        most=f"{largest_number:,}",
        times=counted(recipe.steps_per_image, "time"),
    )


def model_values(config: type[RunConfig], values: JsonMapping) -> JsonObject:
    return {name: values[name] for name in recipe_files.telling(config.family) & values.keys()}


def images_in_step(values: JsonMapping) -> int:
    numbers = [str(values.get(name) or "1") for name in BATCH_OPTIONS]
    return math.prod(map(int, numbers)) if all(n.isdecimal() and len(n) < 6 for n in numbers) else 1


def number_of_images(sent: object) -> int:
    return sent if isinstance(sent, int) and not isinstance(sent, bool) and 0 < sent <= MAX_IMAGES else 0
