"""How a training uses the machine: numbers, memory, several processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.schema import opt


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The kind of numbers that are used."""

    mixed_precision: Literal["no", "fp16", "bf16"] = opt(
        "no", "bf16 for GPUs from 2020 on (RTX 30 and later), fp16 for older ones."
    )
    full_bf16: bool = opt(False, "Keep weights and gradients in bf16 too, in half the memory.")
    full_fp16: bool = opt(False, "Keep weights and gradients in fp16 too, in half the memory.", advanced=True)
    fp8_base: bool = opt(
        False, "Keep the frozen base model in 8 bits, in half the memory of bf16.", label="fp8 base model"
    )
    int8_base: bool = opt(
        False,
        "Keep the frozen image model in 8-bit integers, a scale for each row: as small as fp8, and more exact.",
        label="int8 base model",
    )
    fp8_compute: bool = opt(
        False,
        "Multiply in 8 bits too, on GPUs that can (RTX 40, H100 and later). Much faster, a little less exact.",
        label="fp8 products",
    )

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
            name = "fp8_base" if self.fp8_base else "fp8_base_unet"
            yield f"{name} needs mixed_precision = bf16 or fp16: 8 bits are for keeping, not for computing"
        if self.int8_base and (self.fp8_denoiser or self.fp8_compute):
            yield "int8_base and fp8_base, fp8_base_unet, fp8_compute exclude each other: choose one way of 8 bits"
        elif self.fp8_compute and run.adapters and not self.fp8_denoiser:
            yield "fp8_compute needs a base model in 8 bits: add fp8_base, or leave fp8_compute out"
        if self.fp8_compute and self.mixed_precision == "fp16":
            yield "fp8_compute needs mixed_precision = bf16, which GPUs that multiply in 8 bits have too"

    def notes(self, run: Any) -> Iterator[str]:
        """A model that learns cannot be kept in 8 bits."""
        if self.fp8_base and not run.adapters:
            yield "fp8_base has no effect here: the whole model learns, and 8 bits are too few for that"
        if self.fp8_compute and run.adapters and run.family == "sdxl":
            yield "fp8_compute does not pay for SDXL, whose products are too small (an H200 got slower): leave it out"
        elif self.fp8_compute and run.adapters and not run.compile.compile:
            yield "fp8_compute pays with compile only: eagerly, rounding takes longer than 8 bits save"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What makes a training fit, each at the price of some speed."""

    gradient_checkpointing: bool = opt(
        False, "Compute activations again instead of keeping them. Saves much memory, costs speed."
    )
    cpu_offload_checkpointing: bool = opt(
        False, "Gradient checkpointing that keeps its checkpoints in host memory.", label="Offload checkpoints"
    )
    checkpoint_keep_attention: bool = opt(
        False,
        "Gradient checkpointing that keeps the outputs of attention. Costs a little memory, saves much of the time.",
        label="Keep attention",
    )
    blocks_to_swap: int | None = opt(
        None, "Keep this many blocks of the model in host memory. Saves GPU memory, costs some speed.", min=0
    )
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient", "math", "flash3", "flash4"] = opt(
        "auto",
        "PyTorch's attention kernel to put first. auto is right unless you measured; compile_autotune measures.",
        label="Attention kernel",
        advanced=True,
    )
    sdpa: bool = opt(
        False,
        "PyTorch's own attention. It is always used; the switch is for old configs.",
        label="SDPA attention",
        advanced=True,
    )
    xformers: bool = opt(
        False,
        "Attention of the xformers package. PyTorch's own is used instead.",
        label="xformers attention",
        advanced=True,
    )
    lowram: bool = opt(False, "Load the model straight to the GPU.", label="Low host memory", advanced=True)
    highvram: bool = opt(
        False, "Do not clear the GPU's cache while images are encoded.", label="Much GPU memory", advanced=True
    )

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again in backward: offloading them means so too."""
        return self.gradient_checkpointing or self.cpu_offload_checkpointing or bool(self.blocks_to_swap)

    def check(self, run: Any) -> Iterator[str]:
        """Opposite wishes, and two ways of using the same road to host memory."""
        if self.blocks_to_swap and self.cpu_offload_checkpointing:
            yield "blocks_to_swap and cpu_offload_checkpointing exclude each other: choose one"
        if self.checkpoint_keep_attention and self.cpu_offload_checkpointing:
            yield "checkpoint_keep_attention and cpu_offload_checkpointing exclude each other: choose one"
        if self.lowram and self.highvram:
            yield "lowram and highvram want opposite things: choose one"

    def notes(self, run: Any) -> Iterator[str]:
        """The attention that is really used, what needs checkpointing, and what is slow."""
        if self.blocks_to_swap and not run.adapters and not run.optim.stepped_early:
            yield (
                "blocks_to_swap: swapped blocks are updated by the processor, which takes its time; "
                "optimizer_type = Adafactor with fused_backward_pass updates them on the GPU"
            )
        if self.checkpoint_keep_attention and not self.checkpointing:
            yield "checkpoint_keep_attention has no effect here: add gradient_checkpointing"
        if self.xformers:
            yield "xformers is not used: PyTorch's own attention (SDPA) is as fast and needs no package"


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """Several processes that train together (accelerate launch --num_processes N)."""

    ddp_timeout: int | None = opt(
        None, "Minutes to wait for the other processes.", label="Timeout", min=1, advanced=True
    )
    ddp_gradient_as_bucket_view: bool = opt(
        False,
        "Let gradients share memory with the buffers that are sent.",
        label="Gradients as bucket view",
        advanced=True,
    )
    ddp_static_graph: bool = opt(
        False,
        "Promise that every step uses the same weights, which lets gradients be sent sooner.",
        label="Static graph",
        advanced=True,
    )
