"""How a training uses the machine: numbers, memory, compiling, several processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.reading import switch
from library.config.schema import opt


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The kind of numbers that are used."""

    mixed_precision: Literal["no", "fp16", "bf16"] = opt("no", "bf16 for cards from 2020 on, fp16 for older ones")
    full_bf16: bool = opt(False, "weights and gradients in bf16 too; half the memory")
    full_fp16: bool = opt(False, "weights and gradients in fp16 too", advanced=True)
    fp8_base: bool = opt(False, "keep the frozen model in 8 bits; half the memory again")

    @property
    def fp8_denoiser(self) -> bool:
        """Whether the frozen image model is kept in 8 bits."""
        return self.fp8_base

    @property
    def fp8_encoders(self) -> bool:
        """Whether the frozen text encoders are kept in 8 bits."""
        return self.fp8_base

    def check(self, run: Any) -> Iterator[str]:
        """What needs which mixed precision."""
        if self.full_fp16 and self.full_bf16:
            yield "full_fp16 and full_bf16 exclude each other: choose one"
        for name, needs in (("full_fp16", "fp16"), ("full_bf16", "bf16")):
            if getattr(self, name) and self.mixed_precision != needs:
                yield f"{name} needs mixed_precision = {needs}, which is {self.mixed_precision}"
        if self.fp8_denoiser and self.mixed_precision == "no":
            yield "fp8_base needs mixed_precision = bf16 or fp16: 8 bits are for keeping, not for computing"

    def notes(self, run: Any) -> Iterator[str]:
        """A model that learns cannot be kept in 8 bits."""
        if self.fp8_base and not run.adapters:
            yield "fp8_base has no effect here: the whole model learns, and 8 bits are too few for that"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPrecision(Precision):
    """The same, with the parts told apart."""

    fp8_base_unet: bool = opt(False, "8 bits for the image model only, not for text encoders", advanced=True)

    @property
    def fp8_denoiser(self) -> bool:
        """Whether the frozen image model is kept in 8 bits."""
        return self.fp8_base or self.fp8_base_unet

    @property
    def fp8_encoders(self) -> bool:
        """Whether the frozen text encoders are kept in 8 bits."""
        return self.fp8_base and not self.fp8_base_unet


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What makes a training fit, each at the price of some speed."""

    gradient_checkpointing: bool = opt(False, "compute parts of the model twice instead of keeping them")
    blocks_to_swap: int | None = opt(None, "blocks of the model that wait in host memory", min=0)
    sdpa: bool = opt(False, "PyTorch's attention; always used, the switch is kept for old configs", advanced=True)
    xformers: bool = opt(False, "xformers attention; PyTorch's is used instead", advanced=True)
    lowram: bool = opt(False, "load the model straight to the GPU, for little host memory", advanced=True)
    highvram: bool = opt(False, "do not clear the GPU's cache while encoding", advanced=True)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again in backward."""
        return self.gradient_checkpointing

    def check(self, run: Any) -> Iterator[str]:
        """Opposite wishes."""
        if self.lowram and self.highvram:
            yield "lowram and highvram want opposite things: choose one"

    def notes(self, run: Any) -> Iterator[str]:
        """The attention that is really used."""
        if self.xformers:
            yield "xformers is not used: PyTorch's own attention (SDPA) is as fast and needs no package"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadMemory(Memory):
    """The same, where checkpointed activations can wait in host memory."""

    cpu_offload_checkpointing: bool = opt(
        False, "keep what checkpointing keeps in host memory", label="CPU offload checkpointing"
    )

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again in backward: offloading them means so too."""
        return self.gradient_checkpointing or self.cpu_offload_checkpointing

    def check(self, run: Any) -> Iterator[str]:
        """Two ways of using the same road to host memory."""
        yield from Memory.check(self, run)
        if self.blocks_to_swap and self.cpu_offload_checkpointing:
            yield "blocks_to_swap and cpu_offload_checkpointing exclude each other: choose one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """torch.compile: the same numbers, faster steps, after some seconds at the start."""

    compile: bool = opt(False, "compile the blocks of the model with torch.compile", label="Enable torch.compile")
    compile_backend: Literal["inductor", "cudagraphs", "eager", "aot_eager"] | str = opt(
        "inductor", "what compiles; inductor is the one that makes it fast", label="Backend"
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = opt(
        "default", "how hard to try; the max-autotune modes compile for minutes", label="Mode"
    )
    compile_dynamic: Literal["auto", "true", "false"] = opt(
        "auto",
        "one graph for all image sizes (true), one for each (false), or what suits",
        parse=switch,
        label="Dynamic sizes",
    )
    compile_fullgraph: bool = opt(False, "refuse to run what could not be compiled in one piece", label="Full graph")
    compile_cache_size_limit: int = opt(
        0, "most graphs kept per block; 0 is PyTorch's own, 64 suits many image sizes", min=0, label="Cache size limit"
    )
    compile_fallback: bool = opt(
        False, "train without compiling where it cannot work, instead of stopping", label="Fall back to eager"
    )

    @property
    def dynamic(self) -> bool | None:
        """What torch.compile(dynamic=) takes: True, False, or None for its own choice."""
        return {"auto": None, "true": True, "false": False}[self.compile_dynamic]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """Several processes that train together (accelerate launch --num_processes N)."""

    ddp_timeout: int | None = opt(None, "minutes to wait for the other processes", min=1, advanced=True)
    ddp_gradient_as_bucket_view: bool = opt(False, "gradients share memory with what is sent", advanced=True)
    ddp_static_graph: bool = opt(False, "every step uses the same weights, which lets it send sooner", advanced=True)
