"""What every run's config has besides its sections."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

from library.config import converted, schema
from library.config.json_types import JsonMapping, JsonObject
from library.config.names import FOREIGN, OPTION_ALIASES, RETIRED
from library.config.problems import Message, Problem
from library.config.run_config import UNCHANGED, CaptionChange, ControlUse, Rule
from library.config.values import Option

INEFFECTIVE_EVERYWHERE: Mapping[str, str] = {
    "lowram": "weights are always read directly from the file",
    "highvram": "the GPU's cache is emptied once after encoding, and not after every batch",
    "mem_eff_save": "files are always written tensor by tensor",
    "ddp_gradient_as_bucket_view": "gradients are averaged in pieces, which are not kept",
    "ddp_static_graph": "gradients are averaged without DistributedDataParallel",
}


# The order of the sections in files, in the page and in docs/options.md.
SECTION_ORDER = (
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


class Run:
    """The part of a run's config that is the same for all: its facts, old names, and rules about its own options.

    What a class says of `ineffective`, `aliases` and `foreign` options is added to what its bases say.
    """

    order: ClassVar[tuple[str, ...]] = SECTION_ORDER
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
