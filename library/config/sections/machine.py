"""How a training uses the hardware: precision, memory, several processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from library.config.fixes import exclusive
from library.config.problems import Message, Problem, option_name
from library.config.run_config import RunConfig
from library.config.schema import opt


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number formats of weights, gradients and matrix products."""

    mixed_precision: Literal["no", "fp16", "bf16"] = opt(
        "no", "bf16 for GPUs from 2020 on (RTX 30 and later), fp16 for older ones."
    )
    full_bf16: bool = opt(False, "Trained weights and gradients in bf16: half the memory, less exact.")
    full_fp16: bool = opt(False, "Trained weights and gradients in fp16: half the memory, less exact.", advanced=True)
    fp8_base: bool = opt(
        False,
        "Keep the frozen base model in 8 bits: half the memory of bf16. For LoRA.",
        label="fp8 base model",
    )
    int8_base: bool = opt(
        False,
        "Keep the frozen image model in int8: as small as fp8, more exact.",
        label="int8 base model",
    )
    fp8_compute: bool = opt(
        False,
        "fp8 matrix products (RTX 40, H100 and later), with compile. Faster, less exact.",
        label="fp8 matrix products",
    )
    fp8_transposed_weights: bool = opt(
        False,
        "Keep fp8 weights transposed, too: 2.5 % faster, a byte more for each weight.",
        label="fp8 weights stored twice",
        advanced=True,
    )
    int8_compute: bool = opt(
        False,
        "int8 matrix products (RTX 20 and later), with int8_base and compile. Less exact.",
        label="int8 matrix products",
    )
    int8_rotation: bool = opt(
        False,
        "Rotate values before int8 rounding: more exact with outliers, a little slower.",
        label="Rotated int8 products",
        advanced=True,
    )
    auto_compute: bool = opt(
        False,
        "Time bf16, fp8 and int8 on this GPU for seconds; use the fastest.",
        label="Fastest matrix products",
    )

    @property
    def fp8_denoiser(self) -> bool:
        return self.fp8_base

    @property
    def fp8_encoders(self) -> bool:
        return self.fp8_base

    @property
    def nf4_denoiser(self) -> bool:
        return False

    @property
    def few_bits(self) -> bool:
        # Whether frozen matrices of the image model have at most 8 bits; those of a file in 8 bits then stay so.
        return self.fp8_denoiser or self.int8_base or self.nf4_denoiser

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Check what requires which mixed precision, and which number formats exclude each other.

        All fixes together must lead to a config without these problems: they keep the same options.
        """
        yield from self._half_problems(run)
        yield from self._format_problems(run)
        fixed = [name for name in ("fp8_compute", "int8_compute") if getattr(self, name)]
        if self.auto_compute and fixed:
            yield exclusive(run, "auto_compute", *fixed)

    def _half_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Yield options that need another mixed precision."""
        if self.full_fp16 and self.full_bf16:
            yield exclusive(run, "full_fp16", "full_bf16")
        for name, needs in (("full_fp16", "fp16"), ("full_bf16", "bf16")):
            is_settled = name == "full_bf16" and self.full_fp16  # by the fix that leaves it out
            if getattr(self, name) and self.mixed_precision != needs and not is_settled:
                yield Problem(
                    name,
                    "needs mixed_precision = {needs}, which is {now}",
                    needs=needs,
                    now=self.mixed_precision,
                    also="mixed_precision",
                    fix={"mixed_precision": needs},
                )
        if self.fp8_denoiser and self.mixed_precision == "no":
            name = "fp8_base" if self.fp8_base else "fp8_base_unet"
            yield Problem(
                name,
                "needs mixed_precision = bf16 or fp16: 8-bit weights are converted to it for computing",
                also="mixed_precision",
                fix={"mixed_precision": "fp16" if self.full_fp16 and not self.fp8_compute else "bf16"},
            )
        if self.fp8_compute and self.mixed_precision == "fp16":
            yield Problem(
                "fp8_compute",
                "needs mixed_precision = bf16, which every GPU with 8-bit products supports",
                also="mixed_precision",
                fix={"mixed_precision": "bf16"},
            )

    def _format_problems(self, run: RunConfig) -> Iterator[Problem]:
        """Yield formats of 8 bits that exclude each other, and products without weights in their format."""
        if self.int8_base and (self.fp8_denoiser or self.fp8_compute):
            yield Problem(
                "int8_base",
                "and fp8_base, fp8_base_unet, fp8_compute exclude each other: choose one 8-bit format",
                also="fp8_base fp8_base_unet fp8_compute",
                fix={"int8_base": False} if self.fp8_denoiser or not self.int8_compute else {"fp8_compute": False},
            )
        elif self.fp8_compute and run.adapters and not self.fp8_denoiser:
            yield Problem(
                "fp8_compute",
                "needs a base model in 8 bits: add fp8_base, or leave fp8_compute out",
                also="fp8_base fp8_base_unet",
                fix={"fp8_base": True},
            )
        if self.int8_compute and run.adapters and not self.int8_base:
            in_fp8 = [name for name in ("fp8_base", "fp8_base_unet", "fp8_compute") if getattr(self, name, False)]
            advice, fix = Message("add int8_base, or leave int8_compute out"), {"int8_base": True}
            if in_fp8:
                advice = Message("leave int8_compute out, as {other} is for fp8", other=option_name(in_fp8[0]))
                fix = {"int8_compute": False}
            template = "needs a base model in int8: {advice}"
            yield Problem("int8_compute", template, advice=advice, also="int8_base", fix=fix)

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn that a trained model cannot be stored in 8 bits."""
        if self.fp8_base and not run.adapters:
            yield Problem(
                "fp8_base",
                "has no effect here: the whole model is trained, which needs more than 8 bits",
                fix={"fp8_base": False},
            )
        for name in ("fp8_compute", "int8_compute", "auto_compute"):
            if getattr(self, name) and run.adapters and not run.compile.compile:
                yield Problem(
                    name,
                    "is faster only with {other}: without it, rounding to 8 bits takes longer than it saves",
                    other=option_name("compile"),
                    also="compile",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Options that lower GPU memory use at the cost of speed."""

    gradient_checkpointing: bool = opt(False, "Recompute activations instead of keeping them: less memory, slower.")
    cpu_offload_checkpointing: bool = opt(
        False,
        "Checkpoints wait in CPU memory: saves more GPU memory, with swapped blocks too.",
        label="Offload checkpoints",
    )
    checkpoint_keep_attention: bool = opt(
        False,
        "Checkpointing that keeps attention outputs: faster, a little more memory.",
        label="Keep attention outputs",
    )
    blocks_to_swap: int | None = opt(
        None, "Blocks that are kept in CPU memory. Raise it only until the model fits: costs speed.", min=0
    )
    gpu_memory_limit: float | None = opt(
        None,
        "GPU memory in GB that training may use, CUDA graphs included. Empty: all of it.",
        label="GPU memory limit (GB)",
        min=1.0,
        advanced=True,
    )
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient", "math", "flash3", "flash4"] = opt(
        "auto",
        "PyTorch's attention kernel. auto suits all; compile_autotune measures them.",
        label="Attention kernel",
        advanced=True,
    )
    sdpa: bool = opt(
        False,
        "PyTorch's attention (SDPA). Always used; accepted for old configs.",
        label="SDPA attention",
        advanced=True,
    )
    xformers: bool = opt(
        False,
        "Attention of the xformers package. SDPA is used instead.",
        label="xformers attention",
        advanced=True,
    )
    lowram: bool = opt(
        False,
        "No effect: weights are always read straight from the file. Accepted for old configs.",
        label="Low CPU memory",
        advanced=True,
    )
    highvram: bool = opt(
        False,
        "No effect: the GPU's cache is cleared only once anyway. Accepted for old configs.",
        label="High GPU memory",
        advanced=True,
    )

    @property
    def checkpointing(self) -> bool:
        # Offloading activations implies checkpointing them.
        return self.gradient_checkpointing or self.cpu_offload_checkpointing or bool(self.blocks_to_swap)

    def recomputes_all(self, run: RunConfig) -> bool:
        """Return whether compiled blocks, too, keep nothing but their inputs (and outputs of attention)."""
        return self.checkpointing and not run.compile.keeps_by_budget

    def moves_weights(self, run: RunConfig) -> str:
        """Return the option that copies weights to the GPU in each step, "" if there is none."""
        return "blocks_to_swap" if self.blocks_to_swap else "offload_modulation" if self.moves_modulation(run) else ""

    def moves_modulation(self, run: RunConfig) -> bool:
        return False  # most models have no large layers for it in their blocks

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject contradictory options."""
        if self.checkpoint_keep_attention and self.cpu_offload_checkpointing:
            yield exclusive(run, "checkpoint_keep_attention", "cpu_offload_checkpointing")
        if self.lowram and self.highvram:
            yield exclusive(run, "lowram", "highvram")

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Remark on the attention actually used, on what needs checkpointing, and on slow options."""
        if self.blocks_to_swap and not run.adapters and not run.optim.stepped_early:
            yield Problem(
                "blocks_to_swap",
                ": swapped blocks are updated on the CPU, which is slow; optimizer_type = Adafactor with "
                "fused_backward_pass updates them on the GPU",
            )
        if self.checkpoint_keep_attention and not self.checkpointing:
            yield Problem(
                "checkpoint_keep_attention",
                "has no effect here: add gradient_checkpointing",
                fix={"checkpoint_keep_attention": False},
            )
        if self.xformers:
            yield Problem("xformers", "is not used: PyTorch's own attention (SDPA) is as fast and needs no package")


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributed:
    """Several processes that train together (accelerate launch --num_processes N)."""

    fsdp: bool = opt(
        False,
        "Full fine-tuning: each GPU keeps only a part of the model (FSDP2).",
        label="Shard the model (FSDP2)",
    )
    ddp_timeout: int | None = opt(
        None,
        "Minutes that processes wait for each other before the training ends.",
        label="Timeout",
        min=1,
        ceiling=1_000_000,
        advanced=True,
    )
    ddp_gradient_as_bucket_view: bool = opt(
        False,
        "No effect: gradients are kept only once anyway. Accepted for old configs.",
        label="Gradients as bucket view",
        advanced=True,
    )
    ddp_static_graph: bool = opt(
        False,
        "No effect: gradients are averaged without DDP. Accepted for old configs.",
        label="Static graph",
        advanced=True,
    )

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject what a sharded model cannot do."""
        if not self.fsdp:
            return
        if run.adapters:
            yield Problem(
                "fsdp",
                "is for full fine-tunes, and adapters are too small to shard: leave it out (in `accelerate "
                "config`, choose MULTI_GPU)",
                fix={"fsdp": False},
            )
            return
        excluded = {
            "blocks_to_swap": run.memory.blocks_to_swap,
            run.optim.stepped_early: run.optim.stepped_early,
            "full_fp16": run.precision.full_fp16,
            "compile_autotune": run.compile.compile_autotune,
            "compile_fallback": run.compile.compile_fallback,
        }
        for name in (name for name, on in excluded.items() if on):
            yield exclusive(run, "fsdp", name)
        if run.precision.mixed_precision == "fp16":
            yield Problem(
                "fsdp",
                "cannot be used with mixed_precision = fp16: use bf16",
                also="mixed_precision",
                fix={"mixed_precision": "bf16"},
            )
        if run.compile.compile and run.compile.compile_scope == "model":
            yield Problem(
                "fsdp",
                "cannot be used with compile_scope = model: use compile_scope = blocks",
                also="compile_scope",
                fix={"compile_scope": "blocks"},
            )
