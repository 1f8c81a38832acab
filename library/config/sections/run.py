"""The parts of every run's config besides its sections."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

from library.config import converted, schema
from library.config.json_types import JsonMapping, JsonObject
from library.config.names import ALIASES, FOREIGN, RETIRED
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


# Section order in files, in the page and in docs/options.md.
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


class Run:
    """The common part of a run's config: its facts, old names, and rules about its own options.

    `ineffective`, `aliases` and `foreign` of a class are added to those of its bases.
    """

    order: ClassVar[tuple[str, ...]] = SECTIONS
    family: ClassVar[str]  # the folder in library/families
    script: ClassVar[str]  # the file in sd-scripts/ without .py
    title: ClassVar[str]  # display name
    kind: ClassVar[str]  # what is trained, in one word; part of preset names
    told_by: ClassVar[str] = ""  # an option, or the beginning of several, that tells a file of this kind from others
    adapters: ClassVar[bool]  # whether small weights with their own file are trained beside a frozen model
    can_be_left_out: ClassVar[bool] = False  # whether a pass can leave out the trained weights and use the base model
    usual_rate: ClassVar[str]  # usual learning rate, as text
    file_kind: ClassVar[tuple[str, str]]  # modelspec's name of such a file, and its suffix of the architecture
    grid: ClassVar[int]  # bucket_reso_steps must be a multiple of this many pixels
    shifts_samples: ClassVar[bool] = False  # whether a prompt can set the shift of its sample's sigmas
    ineffective: ClassVar[Mapping[str, str]] = {}  # options of sd-scripts without effect here -> why
    ineffective_rules: ClassVar[
        tuple[Rule, ...]
    ] = ()  # the same for options of the family's own, as the others are set

    # Declared "option" or "option=value" that is not supported yet -> why, and what to do instead, as no flag is
    # accepted and ignored.
    pending: ClassVar[Mapping[str, str]] = {}

    # An option -> a script that has it, or "". Set by code that knows the scripts, which this package does not.
    script_with: ClassVar[Callable[[str], str]] = staticmethod(lambda option: "")

    aliases: ClassVar[Mapping[str, str]] = ALIASES
    retired: ClassVar[Mapping[str, str]] = RETIRED
    foreign: ClassVar[Mapping[str, str]] = FOREIGN
    old: ClassVar[Mapping[str, Option]] = {}  # former options handled by `convert`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("ineffective", "aliases", "foreign"):
            said = [vars(base).get(name, {}) for base in reversed(cls.__mro__)]
            setattr(cls, name, {option: why for known in said for option, why in known.items()})

    @property
    def control_images(self) -> ControlUse:
        return ControlUse()

    @property
    def caption_change(self) -> CaptionChange:
        return UNCHANGED

    @property
    def trains_whole_encoders(self) -> bool:
        return False

    @staticmethod
    def convert(old: JsonMapping, given: Collection[str]) -> tuple[JsonObject, list[Problem]]:
        """Convert checked values of `old` options to values of their replacements, with remarks.

        `given` are the options that are also set.
        """
        return converted.blocks(old, "blocks_to_swap" in given)

    def check(self) -> Iterator[Problem]:
        """Reject unsupported options."""
        # No flag may be accepted and ignored.
        for name, value in self._touched():
            if problem := self.refusal(name, value):
                yield problem

    @classmethod
    def refusal(cls, name: str, value: Any) -> Problem | None:
        """Return the problem of a non-default option that this script does not support yet."""
        reason = cls.pending.get(name) or cls.pending.get(f"{name}={value}", "")
        fix = {name: schema.options(cls)[name].default}
        return Problem(name, "does not work yet: {reason}", reason=Message(reason), fix=fix) if reason else None

    def notes(self) -> Iterator[Problem]:
        """Report set options without effect in this kind of run."""
        for name, _ in self._touched():
            if reason := self.ineffective.get(name) or INEFFECTIVE_EVERYWHERE.get(name):
                fix = schema.defaults(self, name)
                yield Problem(name, "has no effect here: {reason}", reason=Message(reason), fix=fix, code="ineffective")

    def _touched(self) -> Iterator[tuple[str, Any]]:
        for members in schema.changed(self).values():
            yield from members.items()
