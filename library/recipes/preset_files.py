"""The presets of the project: TOML files by model family, kind of training and GPU memory."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from library.config.problems import Message, MessageLike, join_messages

PRESETS_FOLDER = Path(__file__).resolve().parents[2] / "presets"
PROFILES = "compile"  # the folder of presets for every kind of training, which change only how it is compiled
RECIPES = "recipes"  # the folder of recipes, applied on top of presets
NAMED = re.compile(r"(lora|finetune|textual-inversion|lllite)(?:-(\d+)gb)?(?:-.*)?")
# The parts of a preset's first line that hold numbers: each has one translation for all presets.
TEMPLATES = (
    "{model} LoRA on {memory} GB",
    "{model} fine-tune on {memory} GB",
    "{model} textual inversion on {memory} GB",
    "{model} LLLite on {memory} GB",
    "Rank {rank}",
    "{count} blocks swapped",
    "{share} of activations kept",
    "{seconds} s per step and {memory} GiB on an {gpu}.",
)
STANDS_IN = {"dreambooth": "finetune"}  # a kind without presets -> the kind whose presets apply


@dataclass(frozen=True)
class Description:
    """What a preset sets, each setting translated by itself, and its measured time and memory."""

    settings: tuple[str, ...]
    figures: str = ""

    def short(self) -> Message:
        """Return the settings alone."""
        return join_messages([as_message(setting) for setting in self.settings])

    def figures_alone(self) -> MessageLike:
        """Return the figures as a sentence of their own; "" if there are none."""
        return as_message(self.figures[:1].upper() + self.figures[1:]) if self.figures else ""

    def whole(self) -> Message:
        """Return the settings and the figures in one sentence."""
        return join_messages([self.short(), as_message(self.figures)], "; ") if self.figures else self.short()


@dataclass(frozen=True)
class Preset:
    """A file in presets/: its folder is the family, its name the kind and the GPU memory.

    Profiles are presets, too: they fit every family, and change only compiling.
    """

    path: Path
    sentence: str  # its first line, which says what it is for

    @property
    def id(self) -> str:
        return f"{self.family}/{self.path.stem}"

    @property
    def family(self) -> str:
        return self.path.parent.name

    @property
    def kind(self) -> str:
        match = NAMED.fullmatch(self.path.stem)
        return match[1] if match and not self.is_profile else ""

    @property
    def gigabytes(self) -> int:
        match = NAMED.fullmatch(self.path.stem)
        return int(match[2] or 0) if match and not self.is_profile else 0

    @property
    def is_profile(self) -> bool:
        return self.family == PROFILES

    @property
    def title(self) -> Message:
        return as_message(self.sentence.partition(":")[0])

    @property
    def description(self) -> Description:
        """The first line behind the title. Only that of a profile is a sentence: others list settings and figures."""
        text = self.sentence.partition(": ")[2]
        if text.partition(" ")[0].rstrip(",").isalpha():  # neither bf16 nor fp8
            text = text[:1].upper() + text[1:]
        settings, _, figures = text.partition("; ")
        return Description((text,)) if self.is_profile else Description(tuple(settings.split(", ")), figures)


def as_message(part: str) -> Message:
    """Return a part of a preset's first line with its numbers as arguments."""
    for template in TEMPLATES:
        if match := re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(template)), part):
            return Message(template, **match.groupdict())
    return Message(part)


def all_presets() -> list[Preset]:
    """Return all presets, variants after their family, and then the profiles."""
    paths = [path for path in PRESETS_FOLDER.glob("*/*.toml") if path.parent.name != RECIPES]
    first_lines = {path: path.read_text(encoding="utf-8").partition("\n")[0] for path in paths}
    presets = [Preset(path, line.removeprefix("#").strip()) for path, line in first_lines.items()]
    presets.sort(
        key=lambda preset: (
            preset.is_profile,
            preset.family,
            preset.kind,
            preset.gigabytes or math.inf,
            preset.path.name,
        )
    )
    return presets


def presets_of_kind(kind: str) -> list[Preset]:
    return [preset for preset in all_presets() if preset.is_profile or preset.kind == kind]


def profiles() -> list[Preset]:
    return [preset for preset in all_presets() if preset.is_profile]


def of_kind(kind: str, families: Iterable[str]) -> list[Preset]:
    fitting = [preset for preset in presets_of_kind(STANDS_IN.get(kind, kind)) if not preset.is_profile]
    return [preset for family in families for preset in fitting if preset.family == family]


def by_id(name: str) -> Preset | None:
    # Links and files of earlier versions may use a former name.
    return next((preset for preset in all_presets() if preset.id == current_preset_name(name)), None)


def current_preset_name(name: str) -> str:
    """Return the current name of a preset: those of DreamBooth became those of fine-tunes."""
    for old, new in STANDS_IN.items():
        name = re.sub(rf"(^|[\\/]){old}-", rf"\g<1>{new}-", name)
    return name


def path_today(path: Path) -> Path:
    newer = path.with_name(current_preset_name(path.name))
    return newer if newer != path and not path.exists() and newer.exists() else path
