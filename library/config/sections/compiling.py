"""How a training compiles its blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from library.config import compile_rules
from library.config.block_choices import BlockChoice, chosen_blocks, classes_by_word, never_begun, steps_by_word
from library.config.compile_modes import RECORDED_MODES, Mode
from library.config.problems import ConfigError, Message, MessageLike, Problem, option_name
from library.config.reading import switch
from library.config.run_config import RunConfig
from library.config.schema import opt

# The share of activations that blocks with 8-bit products keep less than compile_activation_budget, as measured.
LESS_IN_8_BITS = 0.1
Chosen = tuple[tuple[int, int], ...] | None  # the first and last of each range, None for all


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """torch.compile: the same numbers, faster steps, after some seconds at the start."""

    compile: bool = opt(
        False,
        "Faster steps with torch.compile. Worth it for more than a few minutes of training.",
        label="Enable torch.compile",
    )
    compile_backend: Literal["inductor", "cudagraphs", "eager", "aot_eager"] | str = opt(
        "inductor", "inductor makes training faster; the others are for finding errors.", label="Backend", kind="code"
    )
    compile_mode: Mode = opt(
        "default",
        "Default suits most. Reduce overhead replays CUDA graphs; max autotune takes minutes.",
        label="Mode",
    )
    compile_dynamic: Literal["auto", "true", "false"] = opt(
        "auto",
        "One graph for all image sizes (true), one per size (false), or by the data set (auto).",
        parse=switch,
        label="Dynamic sizes",
        words={"true": "One graph for all sizes", "false": "One graph per size"},
    )
    compile_fullgraph: bool = opt(
        False, "Stop if a block cannot be compiled as one graph. For finding errors.", label="Full graph"
    )
    compile_cache_size_limit: int = opt(
        0,
        "Compiled versions per block at most. 0: PyTorch's default; 64 for many image sizes.",
        min=0,
        label="Cache size limit",
    )
    compile_fallback: bool = opt(
        False,
        "If compiling is not possible, train without it instead of stopping. Usually on.",
        label="Fall back to eager",
    )
    cuda_graphs: Literal["auto", "true", "false"] = opt(
        "auto",
        "Record steps as CUDA graphs and replay them: faster. Auto: where it fits in memory.",
        parse=switch,
        label="CUDA graphs",
    )
    compile_cache_dir: str | None = opt(
        None,
        "The folder of compiled code, used again by later runs. Empty: in your cache directory.",
        label="Cache folder",
        kind="folder",
        advanced=True,
    )

    # Why: docs/decisions/2026-11-20-three-compile-scopes.md
    compile_scope: Literal["blocks", "model", "inner"] = opt(
        "blocks",
        "Blocks compile quickest. Whole model: one large graph. Inside blocks: no checkpointing.",
        label="Scope",
        words={"model": "Whole model", "inner": "Inside blocks"},
        advanced=True,
    )
    compile_blocks: str | None = opt(
        None,
        'Only these blocks: "transformer:all" or "double:0-9,single:all". Empty: all.',
        label="Blocks",
        advanced=True,
    )
    compile_activation_budget: float = opt(
        1.0,
        "Below 1: the share of activations that compiled blocks keep, also with checkpointing.",
        label="Activation budget",
        min=0.0,
        max=1.0,
    )
    compile_autotune: bool = opt(
        False,
        "Measure several settings before training and use the fastest. The result is stored.",
        label="Find the fastest settings",
    )
    compile_compare_steps: int = opt(
        0,
        "Steps to run without compiling first, so that the log tells the time saved. 5 is enough.",
        label="Eager steps for comparison",
        min=0,
        advanced=True,
    )
    compile_warmup: Literal["auto", "true", "beside", "false"] = opt(
        "auto",
        "Compile before the first step (true), during the first steps (beside) or when needed.",
        parse=switch,
        label="When to compile",
        words={"true": "Before the first step", "beside": "During the first steps", "false": "When needed"},
        advanced=True,
    )
    compile_from_step: str | None = opt(
        None,
        'Compile from this step on: 40, or by kind of block "transformer:20, resnet:80".',
        label="Compile from step",
        advanced=True,
    )
    cuda_allow_tf32: bool = opt(
        False,
        "TF32 for float32 products: faster, less exact. Not for mixed precision.",
        label="TF32",
        advanced=True,
    )
    cuda_cudnn_benchmark: bool = opt(
        False,
        "Let cuDNN choose the fastest convolutions. For few image sizes.",
        label="cuDNN benchmark",
        advanced=True,
    )

    # What compile_blocks calls the repeated blocks of a family -> their classes.
    kinds: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Names of blocks, a budget that holds, and a comparison that has something to time."""
        try:
            self.ranges()
        except ConfigError as e:
            yield from e.problems
        try:
            late = self.first_steps()
        except ConfigError as e:
            yield from e.problems
            late = {}
        if late and self.compile_compare_steps:
            yield Problem(
                "compile_from_step",
                "and compile_compare_steps both say when compiling begins: use one of them",
                also="compile_compare_steps",
                fix={"compile_compare_steps": 0},
            )
        if self.compile_compare_steps == 1:
            yield Problem(
                "compile_compare_steps",
                "= 1 measures nothing, as the first step is a warm-up: use 5, or 0",
                fix={"compile_compare_steps": 5},
            )
        if self.records_graphs:
            yield from compile_rules.recording_problems(self, run)
        if self.keeps_by_budget:
            yield from compile_rules.budget_problems(self, run)
        if self.compile:
            yield from compile_rules.scope_problems(self, run, by_kind=any(late))

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """What does nothing without compiling."""
        if not self.compile and self.compile_activation_budget < 1 and not run.memory.checkpointing:
            yield Problem(
                "compile_activation_budget",
                "has no effect here: add {other}, or use gradient_checkpointing",
                other=option_name("compile"),
                fix={"compile_activation_budget": 1.0},
            )
        if self.compile and self.compile_warmup == "beside" and (why := self.why_not_in_background(run)):
            yield Problem(
                "compile_warmup",
                "has no effect here: {reason}",
                reason=why,
                also="compile compile_from_step compile_compare_steps compile_scope blocks_to_swap "
                "offload_modulation cpu_offload_checkpointing",
                fix={"compile_warmup": "auto"},
                code="ineffective",
            )
        if not run.steps.max_train_epochs:
            yield from self.never_begun(run.steps.max_train_steps)
        if self.compile and self.compile_blocks:
            classes, chosen = classes_by_word(self.kinds), self.ranges()
            for word, _ in self._steps_by_word():
                if word and chosen.keys().isdisjoint(classes[word]):
                    yield Problem(
                        "compile_from_step",
                        ": {word} has no effect here, as compile_blocks leaves these blocks out: add them there, or "
                        "leave out their step",
                        word=word,
                        also="compile_blocks",
                    )
        if self.compile and self.compile_scope == "inner" and not run.memory.checkpointing:
            yield Problem(
                "compile_scope", "= inner is the same as blocks here: there is no gradient_checkpointing to leave out"
            )

    def never_begun(self, steps: int) -> Iterator[Problem]:
        return never_begun(self.compile_from_step or "", self.kinds, steps) if self.compile else iter(())

    @property
    def records_graphs(self) -> bool:
        return bool(self.recorded_by)

    @property
    def keeps_by_budget(self) -> bool:
        """Whether PyTorch decides what compiled blocks keep for the backward pass."""
        return self.compile and self.compile_activation_budget < 1

    @property
    def recorded_by(self) -> str:
        """The option that asks for CUDA graphs, "" where none does."""
        if self.cuda_graphs == "true":
            return "cuda_graphs"
        if self.compile and self.compile_mode in RECORDED_MODES:
            return "compile_mode"
        if not self.compile or "cudagraphs" not in self.backends:
            return ""
        return "compile_backend" if self.compile_backend == "cudagraphs" else "compile_blocks"

    def why_not_recorded(self, run: Any) -> str:
        """Why `cuda_graphs` records nothing on any GPU, "" where it may."""
        if self.cuda_graphs == "false":
            return "cuda_graphs is false"
        if self.compile and "cudagraphs" in self.backends:
            return "the backend cudagraphs records by itself"
        if self.compile and self.compile_mode == "max-autotune-no-cudagraphs":
            return f"compile_mode is {self.compile_mode}"
        if moving := run.memory.moves_weights(run):
            return f"{moving} moves weights"
        return "cpu_offload_checkpointing moves inputs" if run.memory.cpu_offload_checkpointing else ""

    @property
    def backends(self) -> set[str]:
        """All backends that are named, for all blocks or for some."""
        try:
            return {self.compile_backend} | {b for _, _, b in self.choices() if b}
        except ConfigError:
            return {self.compile_backend}

    def choices(self) -> list[BlockChoice]:
        """What `compile_blocks` says, part by part: class of block, first and last (None: all), backend or "".

        Raises ConfigError for a name that the family does not have, and for what is no range.
        """
        return chosen_blocks(self.compile_blocks or "", self.kinds)

    def beyond(self, numbers: Mapping[str, int]) -> Iterator[Problem]:
        """What `compile_blocks` asks for and a model does not have; `numbers` are its blocks by class."""
        names = {cls: name for name, cls in self.kinds.items()}
        try:
            choices = self.choices() if self.compile else ()
        except ConfigError:  # which is said by itself
            return
        for cls, chosen, _ in choices:
            name, number = names[cls], numbers.get(cls, 0)
            if chosen and number and chosen[1] >= number:
                yield Problem(
                    "compile_blocks",
                    ": this model has {blocks}, so there is no {asked}; the last is {last}",
                    blocks=Message(
                        "{number} {name} block" if number == 1 else "{number} {name} blocks", number=number, name=name
                    ),
                    asked=f"{name}:{chosen[1]}",
                    last=f"{name}:{number - 1}",
                )

    def ranges(self) -> dict[str, Chosen]:
        """Classes of blocks -> which of them to compile, counted from 0. Empty where all are. Raises ConfigError."""
        ranges: dict[str, Chosen] = {}
        for kind, chosen, _ in self.choices():
            before = ranges.get(kind, ())
            ranges[kind] = None if chosen is None or before is None else (*before, chosen)
        return ranges

    def graphs_of(self, every: Mapping[str, int]) -> int:
        """How many graphs the chosen blocks need, of those that all blocks of each class need."""
        chosen = self.ranges() if self.compile_blocks else dict.fromkeys(every)
        numbers = {kind: sum(last - first + 1 for first, last in some or ()) for kind, some in chosen.items()}
        return sum(min(every[kind], numbers[kind]) if chosen[kind] else every[kind] for kind in chosen)

    def backend_of(self, kind: str, number: int) -> str:
        """The backend of one block. Where several parts of `compile_blocks` name one, the last counts."""
        for cls, chosen, backend in reversed(self.choices()):
            if backend and cls == kind and (chosen is None or chosen[0] <= number <= chosen[1]):
                return backend
        return self.compile_backend

    def first_steps(self) -> dict[str, int]:
        """Class of block -> the first step that it is compiled in; "" for those that have none of their own.

        Empty where all are compiled from the beginning. Raises ConfigError.
        """
        classes = classes_by_word(self.kinds)
        return {cls: step for word, step in self._steps_by_word() for cls in (classes[word] if word else ("",))}

    def _steps_by_word(self) -> list[tuple[str, int]]:
        return steps_by_word(self.compile_from_step or "", self.kinds)

    @property
    def ahead(self) -> bool:
        return self.compile and self.compile_warmup != "false"

    def why_not_in_background(self, run: Any) -> MessageLike:
        """Why blocks cannot be compiled in a process of its own while eager steps are taken, "" where they can be."""
        if self.compile_warmup not in ("auto", "beside"):
            return f"compile_warmup is {self.compile_warmup}"
        if self.compile_from_step or self.compile_compare_steps:
            option = "compile_from_step" if self.compile_from_step else "compile_compare_steps"
            return Message("{option} says when compiling begins", option=option_name(option))
        if self.compile_warmup == "auto" and self.backends != {"inductor"}:
            return "only inductor keeps what it compiles"
        if self.compile_warmup == "auto" and (run.precision.fp8_compute or run.precision.int8_compute):
            return "products in 8 bits are slow in blocks that are not compiled"
        return self.why_not_elsewhere(run)

    def why_not_elsewhere(self, run: Any) -> MessageLike:
        """Why no other process can compile the blocks, "" where one can."""
        if self.compile_scope == "model":
            return "compile_scope is model"
        if run.control_images.guided:
            return "blocks read the control image, which no other process has"
        memory = run.memory
        if moving := memory.moves_weights(run) or (memory.cpu_offload_checkpointing and "cpu_offload_checkpointing"):
            return Message("{option} moves what blocks compute with", option=moving)
        return ""

    @property
    def dynamic(self) -> bool | None:
        return {"auto": None, "true": True, "false": False}[self.compile_dynamic]
