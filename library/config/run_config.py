"""The config of a run as seen by code outside of its family."""

# ruff: noqa: D102 - sections are documented where they are declared

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from library.config import converted, schema
from library.config.json_types import JsonMapping, JsonObject
from library.config.names import FOREIGN, OPTION_ALIASES, RETIRED
from library.config.problems import Message, MessageLike, Problem
from library.config.values import Option

if TYPE_CHECKING:
    from library.config import sections

# Space-separated options, when they have an effect, and the reason shown otherwise.
Rule = tuple[str, Callable[[Any], Any], MessageLike]


@dataclass(frozen=True)
class ControlUse:
    """The images that a model takes besides noise and text."""

    least: int = 0  # required reference images per item
    most: int = 0  # maximum reference images per item
    captioned: bool = False  # whether the text encoder reads them, too, so captions are encoded once with them
    inpaints: bool = False  # whether it takes the image outside of a mask, and the mask
    guided: bool = False  # whether it takes a control image from conditioning_data_dir, as pixels
    random_masks: int = 0  # masks drawn for an image without one; 0: each needs its own


@dataclass(frozen=True)
class CaptionChange:
    """Changes of captions for trained words, before a text encoder reads them."""

    word: str = ""  # replaced by `words`; "" for no replacement
    words: str = ""
    sentences: tuple[str, ...] = ()  # one of these replaces each caption

    def of_prompt(self, prompt: str) -> str:
        return prompt.replace(self.word, self.words) if self.word else prompt


UNCHANGED = CaptionChange()


@dataclass(frozen=True)
class Preservation:
    """What of the base model's knowledge a training keeps: its predictions for another prompt, and their weight."""

    prompt: str  # "" for the empty prompt
    weight: float

    def caption(self, words: str, trigger: str) -> str:
        """Return the prompt for an image: its caption with `prompt` in place of the trigger phrase, else `prompt`."""
        return words.replace(trigger, self.prompt) if self.prompt and trigger and trigger in words else self.prompt


INEFFECTIVE_EVERYWHERE: Mapping[str, str] = {
    "lowram": "weights are always read directly from the file",
    "highvram": "the GPU's cache is emptied once after encoding, and not after every batch",
    "mem_eff_save": "files are always written tensor by tensor",
    "ddp_gradient_as_bucket_view": "gradients are averaged in pieces, which are not kept",
    "ddp_static_graph": "gradients are averaged without DistributedDataParallel",
}


# The order of the sections in files, in the page and in docs/options.md.
SECTIONS = (
    "model",
    "data",
    "captions",
    "cache",
    "network",
    "embedding",
    "control",
    "optim",
    "steps",
    "save",
    "sample",
    "noise",
    "loss",
    "precision",
    "memory",
    "compile",
    "validation",
    "metadata",
    "hub",
    "log",
    "distributed",
)


class RunConfig:
    """The config of a run: its sections, its facts, old names, and rules about its own options.

    The sections below are those of all families; a family's own class adds options to them. `network` and `validation`
    exist only in an `AdapterRun`, `embedding` only in an `EmbeddingRun`, and `control` only in a `ControlRun`.

    A class extends the tables `ineffective`, `aliases` and `foreign` of its bases.
    """

    if TYPE_CHECKING:  # fields of `sections.BaseRun`, whose module imports this one
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

        @property
        def model(self) -> sections.Model: ...

        @property
        def data(self) -> sections.Data: ...

        @property
        def captions(self) -> sections.Captions: ...

        @property
        def cache(self) -> sections.Cache: ...

        @property
        def optim(self) -> sections.Optim: ...

        @property
        def steps(self) -> sections.Steps: ...

        @property
        def save(self) -> sections.Save: ...

        @property
        def sample(self) -> sections.Sampling: ...

        @property
        def noise(self) -> sections.Noise: ...

        @property
        def loss(self) -> sections.Loss: ...

        @property
        def precision(self) -> sections.Precision: ...

        @property
        def memory(self) -> sections.Memory: ...

        @property
        def compile(self) -> sections.Compile: ...

        @property
        def metadata(self) -> sections.Metadata: ...

        @property
        def hub(self) -> sections.Hub: ...

        @property
        def log(self) -> sections.Log: ...

        @property
        def distributed(self) -> sections.Distributed: ...

    order: ClassVar[tuple[str, ...]] = SECTIONS
    family: ClassVar[str]  # the folder in library/families
    script: ClassVar[str]  # the file in sd-scripts/ without .py
    title: ClassVar[str]  # its name for people
    kind: ClassVar[str]  # what is trained, in one word; presets are named after it
    tabs: ClassVar[tuple[str, ...]] = ()  # of the page that it is trained in; (): in all tabs of its kind
    # An option, or the beginning of several, that only files of this kind have; "" for the kind of all other files.
    recognised_by_option: ClassVar[str] = ""
    adapters: ClassVar[bool]  # whether small weights beside a frozen model are trained, and saved in their own file
    can_be_left_out: ClassVar[bool] = False  # whether a pass can leave the trained weights out, for the base model
    encoder_rates: ClassVar[Mapping[str, str]] = {}  # whole text encoders that can learn -> options of their rates
    usual_size: ClassVar[int] = 1024  # of images, in pixels
    usual_rate: ClassVar[str]  # a learning rate to begin with, as people write it
    file_kind: ClassVar[tuple[str, str]]  # modelspec's name for such a file, and its suffix of the architecture
    grid: ClassVar[int]  # bucket_reso_steps must be a multiple of this many pixels
    shifts_samples: ClassVar[bool] = False  # whether samples have sigmas from 1 to 0, which a prompt can shift
    ineffective: ClassVar[Mapping[str, str]] = {}  # options of sd-scripts that do nothing here -> why
    ineffective_rules: ClassVar[tuple[Rule, ...]] = ()  # options that do nothing only in combination with others

    # "option" or "option=value" that is declared but not implemented yet -> why, and what to do instead. No flag is
    # accepted and silently ignored.
    pending: ClassVar[Mapping[str, str]] = {}

    # An option -> another script that has it, or "". The families set it, as this package does not know the scripts.
    script_with: ClassVar[Callable[[str, str], str]] = staticmethod(lambda option, family: "")

    aliases: ClassVar[Mapping[str, str]] = OPTION_ALIASES
    retired: ClassVar[Mapping[str, str]] = RETIRED
    foreign: ClassVar[Mapping[str, str]] = FOREIGN
    refused: ClassVar[Mapping[str, str]] = {}  # options of another kind of training -> why this kind cannot do it
    unfit: ClassVar[frozenset[str]] = frozenset()  # own options that rules of this kind always refuse: forms hide them
    old: ClassVar[Mapping[str, Option]] = {}  # former options, which `convert` turns into current ones

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("ineffective", "aliases", "foreign"):
            inherited = [vars(base).get(name, {}) for base in reversed(cls.__mro__)]
            setattr(cls, name, {option: why for reasons in inherited for option, why in reasons.items()})
        cls.unfit = frozenset().union(*(vars(base).get("unfit", ()) for base in cls.__mro__))

    @property
    def control_images(self) -> ControlUse:
        return ControlUse()

    @property
    def caption_change(self) -> CaptionChange:
        return UNCHANGED

    @property
    def preservation(self) -> Preservation | None:
        return None

    @property
    def trains_whole_encoders(self) -> bool:
        return False  # adapters on text encoders do not count

    @property
    def encoder_steps(self) -> int | None:
        return None  # the steps after which whole text encoders are not trained any more; None: to the end

    @staticmethod
    def convert(old: JsonMapping, set_options: Collection[str]) -> tuple[JsonObject, list[Problem]]:
        # From checked values of `old` options to values of current ones, and notes for the user.
        return converted.convert_blocks_to_swap(old, "blocks_to_swap" in set_options)

    def check(self) -> Iterator[Problem]:
        """Reject what this version cannot do yet, so that no flag is accepted and silently ignored."""
        for name, value in self._changed_options():
            if problem := self.refusal(name, value):
                yield problem

    @classmethod
    def refusal(cls, name: str, value: Any) -> Problem | None:
        """Return the problem of a non-default option that cannot be used in this script yet."""
        reason = cls.pending.get(name) or cls.pending.get(f"{name}={value}", "")
        fix = {name: schema.options_of(cls)[name].default}
        return Problem(name, "does not work yet: {reason}", reason=Message(reason), fix=fix) if reason else None

    def notes(self) -> Iterator[Problem]:
        """Yield options that are set but do nothing in this kind of run."""
        for name, _ in self._changed_options():
            if reason := self.ineffective.get(name) or INEFFECTIVE_EVERYWHERE.get(name):
                fix = schema.defaults(self, name)
                yield Problem(name, "has no effect here: {reason}", reason=Message(reason), fix=fix, code="ineffective")

    def _changed_options(self) -> Iterator[tuple[str, Any]]:
        for members in schema.changed(self).values():
            yield from members.items()


C = TypeVar("C", bound=type[RunConfig])


def configs_of_kind(names: Collection[str], configs: Mapping[str, C]) -> dict[str, C]:
    """Return the configs by script whose kind matches the option names of a file."""
    kind_by_option = {
        config.recognised_by_option: config.kind for config in configs.values() if config.recognised_by_option
    }
    default_kind = next((config.kind for config in configs.values() if not config.recognised_by_option), "")
    kind = next((kind for name, kind in kind_by_option.items() if name in names), "") or next(
        (kind for begin, kind in kind_by_option.items() if any(name.startswith(begin) for name in names)), default_kind
    )
    return {script: config for script, config in configs.items() if config.kind == kind}
