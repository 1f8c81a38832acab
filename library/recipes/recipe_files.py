"""Recipes: advice for a purpose (a character, a style, edits) on top of a preset, by family and model."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import load_toml
from library.config.problems import Message, counted
from library.config.run_config import RunConfig
from library.config.schema import option_values
from library.recipes.preset_files import PRESETS_FOLDER, RECIPES

# Purposes in the order of display; the first that fits is the default.
PURPOSES = {"character": "Character or object", "style": "Style", "edit": "Edit"}
MEANT = {
    "character": "One person, character or thing, which your images show in different places.",
    "style": "The look that all your images share, whatever they show.",
    "edit": "A change to an image: your images show the result, their reference images the original.",
}
ROUNDED_TO = 50  # proposed steps are multiples of this
Condition = Mapping[str, tuple[str, ...]]  # option -> its values


# Why: docs/decisions/2026-11-27-recipes-on-top-of-presets.md
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Advice for one purpose: options, number of images, and steps per image (at batch size 1)."""

    kind: str  # of the trainings that it is for: lora, finetune
    purpose: str  # one of PURPOSES; "" for any
    images: tuple[int, int]  # of a usual data set, from and to
    steps_per_image: int
    least_steps: int
    most_steps: int
    options: JsonMapping
    rank: int = 0  # that `network_alpha` is for; other ranks get an alpha in proportion
    when: Condition = field(default_factory=dict)  # it is for models with these values of options alone
    unless: Condition = field(default_factory=dict)  # and not for those with these

    def fits(self, values: JsonMapping) -> bool:
        return _condition_holds(self.when, values) and not (self.unless and _condition_holds(self.unless, values))


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Requirements of some models of a family, beyond or instead of the family's recipes."""

    kind: str
    when: Condition
    options: JsonMapping
    least_steps: int = 0
    most_steps: int = 0


@dataclass(frozen=True)
class ProposedSteps:
    """A number of steps, and why."""

    steps: int
    reason: Message


def _condition_holds(condition: Condition, values: JsonMapping) -> bool:
    return all(str(values.get(name) or "") in allowed for name, allowed in condition.items())


@functools.cache
def of_family(family: str) -> tuple[tuple[Recipe, ...], tuple[ModelRecipe, ...]]:
    """Return the recipes of a family, and its models' changes to them; none for a family without."""
    path = PRESETS_FOLDER / RECIPES / f"{family}.toml"
    if not path.is_file():
        return (), ()
    tables: Any = load_toml(path)
    recipes = [Recipe(**_table_arguments(table)) for table in tables["recipe"]]
    return tuple(recipes), tuple(ModelRecipe(**_table_arguments(table)) for table in tables.get("model", ()))


def _table_arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(table)
    for name in {"when", "unless"} & table.keys():
        arguments[name] = {option: tuple(values) for option, values in table[name].items()}
    return arguments | ({"images": tuple(table["images"])} if "images" in table else {})


def fitting_recipes(config: RunConfig) -> list[Recipe]:
    """Return the recipes for training this model, by purpose, each with the model's own requirements."""
    recipes, models = of_family(config.family)
    values = option_values(config)
    fitting = [recipe for recipe in recipes if recipe.kind == config.kind and recipe.fits(values)]
    for model in models:
        if model.kind == config.kind and _condition_holds(model.when, values):
            fitting = [_with_model(recipe, model) for recipe in fitting]
    fitting = [_with_rank(recipe, int(values.get("network_dim") or 0)) for recipe in fitting]
    return sorted(fitting, key=lambda recipe: [*PURPOSES, ""].index(recipe.purpose))


def _with_model(recipe: Recipe, model: ModelRecipe) -> Recipe:
    """Return a recipe with a model's requirements: other options, and never fewer steps."""
    options: JsonObject = {**recipe.options, **model.options}
    options["max_train_steps"] = max(int(options["max_train_steps"]), model.least_steps)
    least, most = max(recipe.least_steps, model.least_steps), max(recipe.most_steps, model.most_steps)
    return replace(recipe, least_steps=least, most_steps=most, options=options)


def _with_rank(recipe: Recipe, rank: int) -> Recipe:
    """Return a recipe with the alpha for this rank, so that the adapter keeps its strength."""
    if not (recipe.rank and rank):
        return recipe
    return replace(
        recipe, options={**recipe.options, "network_alpha": recipe.options["network_alpha"] * rank / recipe.rank}
    )


def choose_recipe(config: RunConfig, purpose: str = "") -> Recipe | None:
    recipes = fitting_recipes(config)
    return next((recipe for recipe in recipes if recipe.purpose == purpose), recipes[0] if recipes else None)


def telling(family: str) -> set[str]:
    """Return the options that decide for which models of a family a recipe applies."""
    recipes, models = of_family(family)
    conditions = [*(entry.when for entry in (*recipes, *models)), *(recipe.unless for recipe in recipes)]
    return {name for condition in conditions for name in condition}


def proposed_steps(recipe: Recipe, images: int, images_per_step: int = 1) -> ProposedSteps:
    """Return the proposed steps for a data set of `images` images (at least 1), at `images_per_step`."""
    proposed_views = images * recipe.steps_per_image
    bounded_views = min(max(proposed_views, recipe.least_steps), recipe.most_steps)
    steps = max(ROUNDED_TO, round(bounded_views / max(images_per_step, 1) / ROUNDED_TO) * ROUNDED_TO)
    times = max(1, round(steps * max(images_per_step, 1) / images))
    facts = {"images": counted(images, "image"), "times": counted(times, "time"), "steps": counted(steps, "step")}
    template = "{images}, each seen about {times}: {steps}."
    if bounded_views > proposed_views:
        template = "{images}, each seen about {times}: {steps}, as fewer teach too little."
    elif bounded_views < proposed_views:
        template = "{images}, each seen about {times}: {steps}, as more are rarely needed."
    if steps * max(images_per_step, 1) < images:
        template = "{images}, of which some are not seen: {steps}, as more are rarely needed."
        del facts["times"]
    return ProposedSteps(steps, Message(template, **facts))


def options_of_length(proposal: ProposedSteps, values: JsonMapping) -> JsonObject:
    """Return the options for a proposed length. Samples show halfway, at the latest, what is being learned."""
    options: JsonObject = {"max_train_steps": proposal.steps}
    if interval := values.get("sample_every_n_steps"):
        options["sample_every_n_steps"] = min(interval, max(proposal.steps // 2, 1))
    return options
