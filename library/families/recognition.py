"""What a file of weights is, from its header alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from library import families
from library.config.problems import ConfigError, Text
from library.families.facts import FamilyFacts
from library.families.shared import weights


def described(shapes: Mapping[str, tuple[int, ...]]) -> tuple[FamilyFacts | None, str]:
    """The family that a checkpoint is of, if it is of one that is trained here, and what it is in words that fit into
    a sentence."""

    def some(*parts: str) -> bool:
        return any(part in name for name in shapes for part in parts)

    if some("lora_down", "lora_up", "lora_A", "lora_B", ".hada_w1", ".lokr_w"):
        return None, "a LoRA file"
    for facts in families.every():
        if words := facts.recognise(shapes):
            return facts, words
    if words := next(filter(None, (facts.recognise_part(shapes) for facts in families.every())), ""):
        return None, words
    if some("joint_blocks.0."):
        return None, "an SD3 checkpoint"
    if any(name.startswith(("model.diffusion_model.input_blocks.", "down_blocks.")) for name in shapes):
        return None, _stable_diffusion(shapes)
    if some("encoder.block.0.layer.0.SelfAttention.q.weight"):
        return None, "a T5 text encoder"
    if some("text_model.encoder.layers.0."):
        return None, "a CLIP text encoder"
    if some("decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight"):
        return None, "a VAE"
    return None, "a checkpoint of an unknown kind"


def describe(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a checkpoint is, in words that fit into a sentence."""
    return described(shapes)[1]


def _stable_diffusion(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Which of the older Stable Diffusions a U-Net belongs to: they differ in their text encoders."""
    if not any(name.startswith("model.diffusion_model.") for name in shapes):
        return "an SD 1.5 / SD 2 U-Net in the diffusers layout"
    if any(name.startswith("cond_stage_model.model.") for name in shapes):
        return "an SD 2 checkpoint"
    if any(name.startswith("cond_stage_model.") for name in shapes):
        return "an SD 1.5 checkpoint"
    return "a U-Net of Stable Diffusion without text encoders"


def wrong(path: str | Path, wanted: str) -> ConfigError:
    """The error for a file that is something else than what was wanted, saying what it is."""
    try:
        found = describe(weights.header(path) if Path(path).suffix.lower() == ".safetensors" else {})
    except ConfigError as e:
        return e
    return ConfigError("{path} is {found}, not {wanted}", path=path, found=found, wanted=wanted)


class Recognised(NamedTuple):
    """What a file or folder is."""

    family: str  # of which it is a base model, "" for none
    words: str  # that fit into a sentence
    options: Mapping[str, str | bool] = MappingProxyType({})  # that training it needs


def recognised(path: Path) -> Recognised:
    """What a .safetensors file or a diffusers folder is. Only a header is read. Raises ConfigError when that is not
    possible."""
    if path.is_dir():
        try:
            pipeline = json.loads((path / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError("{path} is not a diffusers model", path=path) from None
        words = Text("a diffusers model ({pipeline})", pipeline=pipeline)
        facts = next((facts for facts in families.every() if pipeline in facts.pipelines), None)
        return Recognised(facts.name, words, facts.model_options.get(pipeline, {})) if facts else Recognised("", words)
    facts, words = described(weights.header(path))
    if facts is None or words not in facts.base_models:
        return Recognised("", words)
    return Recognised(facts.name, words, facts.model_options.get(words, {}))
