"""The purpose of a training in a form: what a recipe sets on top of the preset."""

import math
from typing import Any

from library.config.building import build
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, counted
from library.config.run_config import RunConfig
from library.config.schema import changed, flat, options, values
from library.recipes import recipe_files
from library.recipes.recipe_files import MEANT, PURPOSES, Recipe

STEPS = "max_train_steps"
AT_ONCE = ("train_batch_size", "gradient_accumulation_steps", "num_processes")
MAX_IMAGES = 10**7


def applied(made: Any, model: RunConfig, purpose: str, images: int, at_once: int) -> tuple[Any, JsonObject]:
    """A preset's config with the recipe for a purpose on top, and its description for the form; without `purpose` it is
    the first that fits. `model` says which model of the family is trained, and how many images were counted."""
    recipe = recipe_files.chosen(model, purpose)
    if recipe is None:
        return made, {}
    given = {**flat(changed(made)), **recipe.options}
    proposal = recipe_files.proposed_steps(recipe, images, at_once) if images else None
    if proposal:
        given[STEPS] = proposal.steps
    try:
        with_recipe = build(type(made), given, notes=[])
    except ConfigError:  # the user's settings for the model contradict it
        return made, {}
    return with_recipe, {
        "purpose": recipe.purpose,
        "purposes": [[one.purpose, PURPOSES[one.purpose]] for one in recipe_files.fitting(model) if one.purpose],
        "meant": MEANT.get(recipe.purpose, ""),
        "elsewhere": _elsewhere(model),
        "sets": _sets(recipe, with_recipe),
        "advice": proposal.reason if proposal else _advice(recipe),
    }


def _elsewhere(model: RunConfig) -> Message | str:
    """The family's models that offer a purpose that this model does not; "" for none."""
    offered = {one.purpose for one in recipe_files.fitting(model)}
    for one in recipe_files.of_family(model.family)[0]:
        if one.kind == model.kind and one.when and one.purpose not in offered:
            (wanted,) = one.when.values()
            return Message(
                "{purpose}: choose another model first ({models}).",
                purpose=Message(PURPOSES[one.purpose]),
                models=", ".join(wanted),
            )
    return ""


def _sets(recipe: Recipe, config: RunConfig) -> list[list[str]]:
    """Label and value of the options that a recipe sets, except the steps, which the advice explains."""
    known, now = options(type(config)), values(config)
    return [[known[name].label, _shown(now[name])] for name in recipe.options if name != STEPS]


def _shown(value: Any) -> str:
    """A value in a sentence: 16, 0.0002, the last part of a path."""
    if isinstance(value, tuple):
        return ", ".join(str(one).rpartition("/")[2] for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _advice(recipe: Recipe) -> Message:
    least, most = recipe.images
    return Message(
        "{least} to {most} images are usual, each seen about {times}.",
        least=least,
        most=f"{most:,}",
        times=counted(recipe.steps_per_image, "time"),
    )


def of_model(config: type[RunConfig], given: JsonMapping) -> JsonObject:
    """The values, by option name, that distinguish a family's models."""
    return {name: given[name] for name in recipe_files.telling(config.family) & given.keys()}


def images_in_step(given: JsonMapping) -> int:
    """The number of images per step, by a form's values including the launch settings."""
    numbers = [str(given.get(name) or "1") for name in AT_ONCE]
    return math.prod(map(int, numbers)) if all(n.isdecimal() and len(n) < 6 for n in numbers) else 1


def number_of_images(sent: object) -> int:
    """The number of images that a browser has counted."""
    return sent if isinstance(sent, int) and not isinstance(sent, bool) and 0 < sent <= MAX_IMAGES else 0
