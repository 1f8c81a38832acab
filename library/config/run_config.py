"""The config of a run as seen by code outside of its family."""

# ruff: noqa: D102 - sections are documented where they are declared

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import MessageLike

if TYPE_CHECKING:
    from library.config import sections
    from library.config.problems import Problem

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


class RunConfig(Protocol):
    """The sections that the configs of all families have; a family's own class adds options to them.

    Sections of some kinds only: `network` and `validation` in an `AdapterRun`, `embedding` in an `EmbeddingRun`,
    `control` in a `ControlRun`.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    family: ClassVar[str]
    script: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[str]
    told_by: ClassVar[str]
    adapters: ClassVar[bool]
    can_be_left_out: ClassVar[bool]
    usual_rate: ClassVar[str]
    file_kind: ClassVar[tuple[str, str]]
    grid: ClassVar[int]
    shifts_samples: ClassVar[bool]  # whether a prompt can set the shift of its sample's sigmas
    ineffective: ClassVar[Mapping[str, str]]
    ineffective_rules: ClassVar[tuple[Rule, ...]]
    aliases: ClassVar[Mapping[str, str]]
    retired: ClassVar[Mapping[str, str]]
    foreign: ClassVar[Mapping[str, str]]

    @classmethod
    def refusal(cls, name: str, value: Any) -> "Problem | None": ...
    @staticmethod
    def convert(old: JsonMapping, given: Collection[str]) -> "tuple[JsonObject, list[Problem]]": ...

    @property
    def control_images(self) -> ControlUse: ...
    @property
    def caption_change(self) -> CaptionChange: ...
    @property
    def trains_whole_encoders(self) -> bool: ...
    @property
    def model(self) -> "sections.Model": ...
    @property
    def data(self) -> "sections.Data": ...
    @property
    def captions(self) -> "sections.Captions": ...
    @property
    def cache(self) -> "sections.Cache": ...
    @property
    def optim(self) -> "sections.Optim": ...
    @property
    def steps(self) -> "sections.Steps": ...
    @property
    def save(self) -> "sections.AdapterSave | sections.EmbeddingSave | sections.FullSave": ...
    @property
    def sample(self) -> "sections.Sample": ...
    @property
    def noise(self) -> "sections.Noise": ...
    @property
    def loss(self) -> "sections.Loss": ...
    @property
    def precision(self) -> "sections.Precision": ...
    @property
    def memory(self) -> "sections.Memory": ...
    @property
    def compile(self) -> "sections.Compile": ...
    @property
    def metadata(self) -> "sections.Metadata": ...
    @property
    def hub(self) -> "sections.Hub": ...
    @property
    def log(self) -> "sections.Log": ...
    @property
    def distributed(self) -> "sections.Distributed": ...


C = TypeVar("C", bound=type[RunConfig])


def of_told_kind(names: Collection[str], configs: Mapping[str, C]) -> dict[str, C]:
    """Return the configs by script whose kind matches the option names of a file."""
    told = {config.told_by: config.kind for config in configs.values() if config.told_by}
    whole = next((config.kind for config in configs.values() if not config.told_by), "")
    kind = next((kind for name, kind in told.items() if name in names), "") or next(
        (kind for begin, kind in told.items() if any(name.startswith(begin) for name in names)), whole
    )
    return {script: config for script, config in configs.items() if config.kind == kind}
