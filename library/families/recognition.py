"""Recognise a checkpoint from its header."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from library import families
from library.config.json_types import JsonObject
from library.config.outside_files import table_of
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.families.facts import FamilyFacts, Shapes, matching
from library.families.shared import tensor_names, weights
from library.families.shared.folder_checkpoints import checkpoints, version
from library.families.shared.known_files import SHARED, UNKNOWN, UNTRAINED
from library.families.shared.raw_header import header_metadata

V_PREDICTION = {"v_parameterization": True}
INDEXES = ("model_index.json", "modular_model_index.json")  # of a pipeline, and of a modular pipeline
# Tensors that only adapters have, of any kind: the prefixes of kohya's names, or what each kind calls its tensors.
ADAPTER_PATTERN = re.compile(
    r"^(lora_(unet|te\d?|transformer|prior)|lycoris)_|lora_(down|up|A|B|magnitude)|"
    r"\.(hada_|lokr_|oft_|boft_|on_input$|diff(_b)?$)|\.[ab][12]\.weight$"
)


def family_and_description(shapes: Shapes) -> tuple[FamilyFacts | None, str]:
    return _described(tuple(shapes.items()))


@functools.lru_cache(maxsize=32)  # called several times per file in each check of a form
def _described(entries: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[FamilyFacts | None, str]:
    shapes = dict(entries)
    if any(map(ADAPTER_PATTERN.search, shapes)):
        return None, "a LoRA file"
    wrapper = tensor_names.shared_prefix([*shapes])
    plain = {name: shapes[key] for name, key in tensor_names.without_prefix(shapes).items()}
    unwrapped = {name.removeprefix(wrapper): shape for name, shape in shapes.items()}
    if words := matching(UNTRAINED, plain):
        return None, words
    for facts in sorted(families.all_families(), key=lambda facts: not facts.recognised_first):
        # A file of all networks is recognised by its full names, a denoiser by names without prefix.
        namings = (shapes, unwrapped, plain) if facts.denoiser_prefix else (plain, shapes)
        if words := next(filter(None, map(facts.recognise, namings)), ""):
            return facts, words
    if words := next(filter(None, (facts.recognise_part(shapes) for facts in families.all_families())), ""):
        return None, words
    if any("joint_blocks.0." in name for name in shapes):
        return None, "an SD3 checkpoint"
    if any(name.startswith(("model.diffusion_model.input_blocks.", "down_blocks.")) for name in shapes):
        return None, _stable_diffusion(shapes)
    return None, matching(SHARED, shapes) or UNKNOWN


def describe_checkpoint(shapes: Shapes) -> str:
    return family_and_description(shapes)[1]


def _stable_diffusion(shapes: Shapes) -> str:
    """Describe a U-Net of an older Stable Diffusion: these differ in their text encoders."""
    if not any(name.startswith("model.diffusion_model.") for name in shapes):
        return "a U-Net of another Stable Diffusion in the diffusers layout"
    if any(name.startswith("cond_stage_model.model.") for name in shapes):
        return "an SD 2 checkpoint"
    return "a U-Net of Stable Diffusion without text encoders"


def wrong_kind_error(path: str | Path, expected: str) -> ConfigError:
    """Return the error for a file of another kind than expected, with the file's description."""
    try:
        checkpoint = describe_checkpoint(weights.header(path) if Path(path).suffix.lower() == ".safetensors" else {})
    except ConfigError as e:
        return e
    return ConfigError("{path} is {found}, not {wanted}", path=path, found=checkpoint, wanted=expected)


def index_of(folder: Path) -> JsonObject:
    """Return the index of a diffusers folder with a whole model; empty for any other folder."""
    for name in INDEXES:
        if index := table_of(folder / name):
            return index
    return {}


class Recognised(NamedTuple):
    """A recognised file or folder."""

    family: str  # of a base model, else ""
    words: MessageLike  # its description, as part of a sentence
    options: Mapping[str, str | bool] = MappingProxyType({})  # that training it requires


def whole_model(path: Path) -> Path | None:
    """Return the folder of a whole diffusers model from its path, its `transformer` folder or a file in that; None for
    any other path.
    """
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "transformer").is_dir() and index_of(folder):
            return folder
    return None


def recognise_file(path: Path) -> Recognised:
    """Recognise a .safetensors file, possibly sharded, or a diffusers folder of a whole model or its transformer.

    Reads headers only. Raises ConfigError if they are unreadable.
    """
    whole = whole_model(path)
    if whole is None or whole / "transformer" not in (path, path.parent):
        whole = path
    if pipeline := index_of(whole).get("_class_name"):
        words = Message("a diffusers model ({pipeline})", pipeline=pipeline)
        facts = next((facts for facts in families.all_families() if pipeline in facts.pipelines), None)
        if facts is None:
            return Recognised("", words)
        return Recognised(facts.name, words, {**facts.model_options.get(pipeline, {}), **_stated_options(facts, whole)})
    if path.is_dir() and len(inside := checkpoints(path)) > 1:
        return _recognise_folder(inside)
    return _recognise_checkpoint(path)


def _recognise_folder(paths: Sequence[Path]) -> Recognised:
    """Recognise a folder of several checkpoints: as one of its models, if all are of one family."""
    models = [recognised for path in paths if (recognised := _cached(path, version(path))) and recognised.family]
    if len(models) == 1:
        return models[0]
    if len({model.family for model in models}) == 1:
        return Recognised(models[0].family, models[0].words)
    return Recognised("", "a folder with models of several kinds" if models else "a folder without a model")


@functools.lru_cache(maxsize=1024)
def _cached(path: Path, _version: tuple[int, int]) -> Recognised | None:
    try:
        return _recognise_checkpoint(path)
    except ConfigError:  # it is damaged
        return None


def _recognise_checkpoint(path: Path) -> Recognised:
    shapes = {name: shape for file in weights.files(path) for name, shape in weights.header(file).items()}
    facts, words = family_and_description(shapes)
    if facts is None or words not in facts.base_models:
        return Recognised("", words)
    return Recognised(facts.name, words, {**facts.model_options.get(words, {}), **_stated_options(facts, path)})


def _stated_options(facts: FamilyFacts, path: Path) -> Mapping[str, str | bool]:
    """Return the options of a base model that it states itself: whether it predicts v, by its scheduler, the metadata
    of other trainers, or a tensor without numbers that ComfyUI looks for.
    """
    if not facts.has_prediction_type:
        return {}
    kind: Any = table_of(path / "scheduler" / "scheduler_config.json").get("prediction_type")
    if path.suffix == ".safetensors" and path.is_file():
        kind = "v" if "v_pred" in weights.header(path) else header_metadata(path).get("modelspec.prediction_type")
    return V_PREDICTION if kind in ("v", "v_prediction") else {}


def proposed_options(path: Path, recognised: Recognised) -> Mapping[str, str | bool]:
    """Return the options that a base model requires, from its header, or else from its name, which may mislead."""
    if recognised.options or not recognised.family:
        return recognised.options
    return _named_options(recognised.family, path.name)


def _named_options(family: str, name: str) -> Mapping[str, str | bool]:
    named = families.facts_of(family).named_options
    return next((values for pattern, values in named.items() if re.search(pattern, name.lower())), {})


def find_name_notes(family: str, path: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a remark for each option that a base model contradicts, by what it states, or by its name: distilled files
    look like others.

    `values` are the options of the model by name.
    """
    name = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    stated: Mapping[str, str | bool] = {}
    with contextlib.suppress(ConfigError, OSError):
        stated = _stated_options(families.facts_of(family), Path(path))
    for option, meant in {**_named_options(family, name), **stated}.items():
        value = values.get(option, meant)
        if value != meant and not str(value).startswith(f"{meant}-"):  # "edit" is in the name of edit-2509, too
            template = ": {name} has the name of a model for {key} = {meant}: set that, or rename the file"
            if option in stated:
                template = ": {name} says that it is a model for {key} = {meant}: set that"
            text = str(meant).lower() if isinstance(meant, bool) else meant
            yield Problem(option, template, name=name, key=option, meant=text, fix={option: meant})
