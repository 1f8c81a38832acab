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

    The sections are those that the configs of all families have; a family's own class adds options to them. Those of
    adapter trainings only, `network` and `validation`, have a config that is an `AdapterRun`; `embedding` has one that
    is an `EmbeddingRun`, `control` one that is a `ControlRun`.

    What a class says of `ineffective`, `aliases` and `foreign` options is added to what its bases say.
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
        def sample(self) -> sections.Sample: ...

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
    title: ClassVar[str]  # what a person calls it
    kind: ClassVar[str]  # what learns, in one word: presets are named after it
    told_by: ClassVar[str] = ""  # an option, or the beginning of several, that tells a file of this kind from others
    adapters: ClassVar[bool]  # what learns is small and has a file of its own, and the model stays as it is
    can_be_left_out: ClassVar[bool] = False  # whether a pass can do without what learns, and the base model answers
    usual_rate: ClassVar[str]  # a learning rate to begin with, as a person writes it
    file_kind: ClassVar[tuple[str, str]]  # what modelspec calls such a file, and what it adds to the architecture
    grid: ClassVar[int]  # bucket_reso_steps must be a multiple of this many pixels
    shifts_samples: ClassVar[bool] = False  # whether a prompt can say how far the sigmas of its sample are shifted
    ineffective: ClassVar[Mapping[str, str]] = {}  # options that sd-scripts knows but that do nothing here -> why
    ineffective_rules: ClassVar[
        tuple[Rule, ...]
    ] = ()  # the same for options of the family's own, as the others are set

    # "option" or "option=value" that is declared but not honoured yet -> why, and what to do instead: a flag is never
    # accepted and ignored.
    pending: ClassVar[Mapping[str, str]] = {}

    # An option -> a script that has it, or "": this room knows of no scripts, those who make one of it do.
    script_with: ClassVar[Callable[[str], str]] = staticmethod(lambda option: "")

    aliases: ClassVar[Mapping[str, str]] = OPTION_ALIASES
    retired: ClassVar[Mapping[str, str]] = RETIRED
    foreign: ClassVar[Mapping[str, str]] = FOREIGN
    old: ClassVar[Mapping[str, Option]] = {}  # options that `convert` makes others of

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("ineffective", "aliases", "foreign"):
            said = [vars(base).get(name, {}) for base in reversed(cls.__mro__)]
            setattr(cls, name, {option: why for known in said for option, why in known.items()})

    @property
    def control_images(self) -> ControlUse:
        """What pictures the model is shown besides noise and words."""
        return ControlUse()

    @property
    def caption_change(self) -> CaptionChange:
        """What is made of captions before a text encoder reads them."""
        return UNCHANGED

    @property
    def trains_whole_encoders(self) -> bool:
        """Whether the weights of the text encoders are trained, and not adapters on them."""
        return False

    @staticmethod
    def convert(old: JsonMapping, given: Collection[str]) -> tuple[JsonObject, list[Problem]]:
        """Checked values of `old` options -> values of those that took their place, and what to tell the user.

        `given` are the options that are set besides.
        """
        return converted.convert_blocks_to_swap(old, "blocks_to_swap" in given)

    def check(self) -> Iterator[Problem]:
        """Refuse what this version cannot do yet, so that no flag is accepted and ignored."""
        for name, value in self._touched():
            if problem := self.refusal(name, value):
                yield problem

    @classmethod
    def refusal(cls, name: str, value: Any) -> Problem | None:
        """The problem of an option that differs from its default and cannot be used in this script yet."""
        reason = cls.pending.get(name) or cls.pending.get(f"{name}={value}", "")
        fix = {name: schema.options_of(cls)[name].default}
        return Problem(name, "does not work yet: {reason}", reason=Message(reason), fix=fix) if reason else None

    def notes(self) -> Iterator[Problem]:
        """Say which options are set but do nothing in this kind of run."""
        for name, _ in self._touched():
            if reason := self.ineffective.get(name) or INEFFECTIVE_EVERYWHERE.get(name):
                fix = schema.defaults(self, name)
                yield Problem(name, "has no effect here: {reason}", reason=Message(reason), fix=fix, code="ineffective")

    def _touched(self) -> Iterator[tuple[str, Any]]:
        for members in schema.changed(self).values():
            yield from members.items()


C = TypeVar("C", bound=type[RunConfig])


def of_told_kind(names: Collection[str], configs: Mapping[str, C]) -> dict[str, C]:
    """Return the configs by script whose kind matches the option names of a file."""
    told = {config.told_by: config.kind for config in configs.values() if config.told_by}
    whole = next((config.kind for config in configs.values() if not config.told_by), "")
    kind = next((kind for name, kind in told.items() if name in names), "") or next(
        (kind for begin, kind in told.items() if any(name.startswith(begin) for name in names)), whole
    )
    return {script: config for script, config in configs.items() if config.kind == kind}
