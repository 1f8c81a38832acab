"""How a training compiles its blocks."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from library.config.reading import switch
from library.config.schema import opt
from library.config.values import ConfigError, meant

Chosen = tuple[tuple[int, int], ...] | None  # the first and last of each range, None for all


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """torch.compile: the same numbers, faster steps, after some seconds at the start."""

    compile: bool = opt(
        False,
        "Compile the model's blocks: faster steps after some seconds of compiling at the start.",
        label="Enable torch.compile",
    )
    compile_backend: Literal["inductor", "cudagraphs", "eager", "aot_eager"] | str = opt(
        "inductor", "What compiles. inductor is the one that makes training fast.", label="Backend"
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = opt(
        "default",
        "How much is tried. The max-autotune modes compile for minutes; reduce-overhead needs fixed sizes.",
        label="Mode",
    )
    compile_dynamic: Literal["auto", "true", "false"] = opt(
        "auto",
        "true compiles once for all image sizes, false once per size, auto leaves it to PyTorch.",
        parse=switch,
        label="Dynamic sizes",
    )
    compile_fullgraph: bool = opt(
        False, "Stop with an error if a block cannot be compiled in one piece.", label="Full graph"
    )
    compile_cache_size_limit: int = opt(
        0,
        "Most compiled versions per block. 0 is PyTorch's own limit; 64 suits many image sizes.",
        min=0,
        label="Cache size limit",
    )
    compile_fallback: bool = opt(
        False, "Where compiling is not possible, train without it instead of stopping.", label="Fall back to eager"
    )
    compile_cache_dir: str | None = opt(
        None,
        "The folder that keeps compiled code for the next start. Empty: one in your cache folder.",
        label="Cache folder",
        kind="folder",
        advanced=True,
    )

    compile_blocks: str | None = opt(
        None,
        'Compile some blocks only: "double:0-9,single:all" (FLUX.1), "transformer:all,resnet:0-5" (SDXL). Empty: all.',
        label="Blocks",
        advanced=True,
    )
    compile_activation_budget: float = opt(
        1.0,
        "The share of activations to keep for the backward pass, 0 to 1. The rest is computed again, to save memory.",
        label="Activation budget",
        min=0.0,
        max=1.0,
        advanced=True,
    )
    compile_compare_steps: int = opt(
        0,
        "Do this many steps without compiling first, so that the log can tell what compiling saves. 5 will do.",
        label="Eager steps to compare with",
        min=0,
        advanced=True,
    )

    compile_warmup: Literal["true", "false"] = opt(
        "true",
        "Compile everything before the first step. false compiles what a step needs when it needs it.",
        parse=switch,
        label="Compile before the first step",
        advanced=True,
    )

    cuda_allow_tf32: bool = opt(
        False,
        "Let NVIDIA GPUs round float32 matrix products to TF32, much faster. Nothing changes with mixed precision.",
        label="TF32",
        advanced=True,
    )
    cuda_cudnn_benchmark: bool = opt(
        False,
        "Let cuDNN try its kernels for each size of convolution (SDXL, VAE). Pays with few image sizes.",
        label="cuDNN benchmark",
        advanced=True,
    )

    # What compile_blocks calls the repeated blocks of a family -> their classes.
    kinds: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def check(self, run: Any) -> Iterator[str]:
        """Names of blocks, a budget that holds, and a comparison that has something to time."""
        try:
            self.ranges()
        except ConfigError as e:
            yield str(e)
        if self.compile_compare_steps == 1:
            yield "compile_compare_steps = 1 times nothing: the first step only warms up; use 5, or 0 for no comparison"

        if self.compile and self.compile_activation_budget < 1:
            yield from self._against_the_budget(run)
        if self.compile and self.records_graphs:
            yield from self._against_recording(run)

    def notes(self, run: Any) -> Iterator[str]:
        """What does nothing without compiling."""
        if not self.compile and self.compile_activation_budget < 1:
            yield "compile_activation_budget has no effect here: add compile, or use gradient_checkpointing"

    @property
    def records_graphs(self) -> bool:
        """Whether CUDA graphs are recorded: kernels are played back at fixed addresses and for fixed sizes."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")

    def _against_recording(self, run: Any) -> Iterator[str]:
        instead = "default" if self.compile_mode == "reduce-overhead" else "max-autotune-no-cudagraphs"
        if run.memory.blocks_to_swap:
            yield (
                f"compile_mode = {self.compile_mode} needs weights that stay where they are, and blocks_to_swap "
                f"moves them: use {instead}"
            )
        if run.memory.cpu_offload_checkpointing:
            yield (
                f"compile_mode = {self.compile_mode} needs inputs that stay where they are, and "
                f"cpu_offload_checkpointing moves them: use {instead}, or gradient_checkpointing"
            )

    def _against_the_budget(self, run: Any) -> Iterator[str]:
        if run.memory.checkpointing:
            yield (
                "compile_activation_budget cannot be used with gradient_checkpointing, its offloading or "
                "blocks_to_swap, which all keep no activations of a block: choose one"
            )
        if self.compile_backend not in ("inductor", "aot_eager"):
            yield f"compile_activation_budget needs compile_backend = inductor; {self.compile_backend} keeps everything"
        # PyTorch may then draw another mask for the backward pass than for the forward one (pytorch#190717).
        network = getattr(run, "network", None)
        if network and (network.network_dropout or any("dropout=" in arg for arg in network.network_args or ())):
            yield "compile_activation_budget cannot be used with dropout: set one of them to its default"

    def ranges(self) -> dict[str, Chosen]:
        """Classes of blocks -> which of them to compile, counted from 0. Empty where all are.

        Raises ConfigError for a name that the family does not have, and for what is no range.
        """
        found: dict[str, list[tuple[int, int]] | None] = {}
        kind = ""
        for part in filter(None, (p.strip() for p in (self.compile_blocks or "").split(","))):
            name, colon, text = part.rpartition(":")
            kind = name.strip() if colon else kind
            if kind not in self.kinds:
                raise ConfigError(
                    f"compile_blocks: there are no blocks called {kind or part!r}{meant(kind or part, self.kinds)}; "
                    f"choose from {', '.join(self.kinds)}, such as {next(iter(self.kinds))}:0-9"
                )
            chosen = found.setdefault(self.kinds[kind], [])
            found[self.kinds[kind]] = None if chosen is None or text.strip() == "all" else [*chosen, _range(kind, text)]
        return {name: None if chosen is None else tuple(chosen) for name, chosen in found.items()}

    @property
    def ahead(self) -> bool:
        """Whether all compiling is over before the first step."""
        return self.compile and self.compile_warmup == "true"

    @property
    def dynamic(self) -> bool | None:
        """What torch.compile(dynamic=) takes: True, False, or None for its own choice."""
        return {"auto": None, "true": True, "false": False}[self.compile_dynamic]


def _range(kind: str, text: str) -> tuple[int, int]:
    """3 or "0-9" -> the first and the last."""
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ConfigError(
            f"compile_blocks: {kind}:{text.strip()} is no range of blocks; write {kind}:all or {kind}:0-9"
        )
    return first, last
