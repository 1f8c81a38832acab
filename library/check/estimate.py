"""Estimate a training's peak GPU memory and seconds per step before it starts. `kohya probe` measures instead.

Memory is counted (weights, gradients, optimizer states) plus estimated activations per block and token. Time is the
number of operations over a rate: that of an earlier run on this machine if there is one, else a share of the GPU's data
sheet rate.
"""

from dataclasses import asdict, dataclass, field

from library.config import environment
from library.config.building import build_config, replace_options
from library.config.formats import read_toml
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun, ControlRun, EmbeddingRun
from library.config.sections.compiling import LESS_IN_8_BITS
from library.measuring.model_stats import ModelStats, model_stats
from library.measuring.operations import count_block_tokens, data_sheet_rate, operations_of_image
from library.memory import swapping
from library.memory.quantization import fp8_storage, nf4
from library.methods import assistant_lora
from library.methods.base import trained_dtype
from library.runs import layout, reader

BYTES_PER_GIB = 2**30
BYTES = {"no": 4, "fp16": 2, "bf16": 2}

# Fitted to steps of rank 16 on an H200 at 1024 x 1024, batches of 1 and 4; docs/dev/performance.md.

COMPILED_ACTIVATIONS = 0.725  # share of autograd's activations that compiled graphs keep
CHECKPOINT_WITH_ATTENTION = 2.1  # size of a checkpoint that keeps attention outputs, in block inputs
SWAP = 1 / 110e9  # seconds per swapped byte and step not hidden by computation
LINK = 45e9  # bytes per second between host and device while blocks compute
IN_TRANSIT = 4  # block inputs in transit between host and device at a time
# Optimizer states in bytes of GPU memory per trained parameter; those of paged optimizers can move to CPU memory.
STATES = {
    "adamw8bit": 2,
    "pagedadamw8bit": 0,
    "pagedadamw": 0,
    "pagedadamw32bit": 0,
    "lion": 4,
    "lion8bit": 1,
    "pagedlion8bit": 0,
    "sgdnesterov": 4,
    "sgdnesterov8bit": 1,
    "adafactor": 0.1,
    "prodigy": 16,
    "came": 4,
    "adammini": 4,
    "muon": 4,
    "prodigyplusschedulefree": 5,
    "dadaptation": 12,
    "dadaptadampreprint": 12,
    "dadaptadagrad": 12,
    "dadaptadam": 12,
    "dadaptadan": 20,
    "dadaptadanip": 20,
    "dadaptsgd": 12,
    "sgdschedulefree": 4,
}
USUAL_STATES = 8  # two float32 values, as in AdamW
CONTEXT = 0.85 * BYTES_PER_GIB  # memory of the driver, cuBLAS and cuDNN
SLACK = 1.08  # for fragmentation
RECORDED = 0.67 * BYTES_PER_GIB  # additional memory of recorded compiled convolutions, whatever they keep
FILLED = 0.95  # share of GPU memory taken by recordings before they are given up

LAUNCH_SECONDS = {False: 0.7e-3, True: 0.3e-3}  # seconds of host work per block and pass, eager and compiled
LOKR_FULL_RANK = 64  # rank roughly equivalent to LoKr's full factors
WORD = 2048  # approximate parameters of a trained word in all text encoders
RUNS = 30  # earlier runs to search for a rate


# Counted from headers, as building the networks would load diffusers and transformers for 4 s.
# Why: docs/decisions/2026-11-22-estimates-say-what-they-rest-on.md
@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The estimate. Sizes in GiB; `step` in seconds, None for an unknown GPU."""

    peak: float
    parts: dict[str, float] = field(default_factory=dict)
    step: float | None = None
    gpu: str = ""
    memory: float | None = None  # of the GPU
    basis: MessageLike = ""

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None else self.peak <= self.memory * 0.97

    def as_json(self) -> JsonObject:
        return {**asdict(self), "basis": str(self.basis), "fits": self.fits}

    def sentence(self) -> Message:
        """Return the estimate in words."""
        of_all: MessageLike = ""
        if self.memory and self.gpu:
            of_all = Message(" of the {memory} GB of {gpu}", memory=f"{self.memory:.0f}", gpu=self.gpu)
        pace = Message(", {step} s a step", step=f"{self.step:.2g}") if self.step else ""
        template = "estimate: about {peak} GB of GPU memory{of_all}{pace} ({basis})"
        return Message(template, peak=f"{self.peak:.1f}", of_all=of_all, pace=pace, basis=self.basis)


def estimate(config: RunConfig, size: tuple[int, int], gpu: str = "", memory: float | None = None) -> MemoryEstimate:
    """Return the estimate for batches of images of `size` (width, height) in pixels on a GPU with `memory` GiB."""
    model = model_stats(config)
    parts = {
        name: round(value / BYTES_PER_GIB, 2)
        for name, value in _memory_parts(config, model, size, memory).items()
        if value
    }
    peak = sum(parts.values()) * SLACK
    counted = "counted parameters" if model.counted else "the parameters of the published model"
    rate, rate_basis = last_run_rate(config, gpu, model)
    if not rate and gpu:
        share = model.utilization[config.compile.compile]
        rate = data_sheet_rate(gpu) * 1e12 * share
        rate_basis = Message("{share} of this GPU's theoretical peak", share=f"{share:.0%}")
    passes = 3 + config.memory.recomputes_all(config)
    passes = (2 * passes + 1 if config.preservation else passes) * config.steps.gradient_accumulation_steps
    launches = len(model.blocks) * passes * LAUNCH_SECONDS[config.compile.compile]  # kernel launches by the host
    step = max(operations(config, model, size) / rate, launches) if rate else None
    if step and config.memory.moves_weights(config):
        step = _moving_seconds(config, model, step)
    template = "from {counted} and {known}" if rate else "from {counted}; the speed of this machine is not known yet"
    basis = Message(template, counted=Message(counted), known=rate_basis)
    return MemoryEstimate(round(peak, 1), parts, step, gpu, memory, basis)


def _moving_seconds(config: RunConfig, model: ModelStats, step: float) -> float:
    """Return the seconds of a step with the copies of weights that wait in CPU memory."""
    # Weights are copied in for the forward and the backward pass; trained ones, or their gradients, are also copied
    # back. Modulation is copied for the forward pass only.
    modulation = _offloaded_modulation(config, model)
    moving = {"blocks_to_swap": 0, "fp8_transposed_weights": False}
    moving |= {"offload_modulation": False} if modulation else {}
    swapped = _weight_memory(replace_options(config, **moving), model) - _weight_memory(config, model) - modulation
    copied = swapped * (2 if config.adapters else 3) + modulation
    return max(step + (swapped + modulation / 2) * SWAP, copied / LINK)


# ---- memory


def _memory_parts(
    config: RunConfig, model: ModelStats, size: tuple[int, int], memory: float | None
) -> dict[str, float]:
    trained = trained_parameters(config, model)
    gradient_bytes = _trained_bytes(config)
    steps_early = bool(config.optim.stepped_early)
    weights, optimizer = _weight_memory(config, model), (config.optim.optimizer or "AdamW").lower()
    states = trained * _state_bytes(config, optimizer)
    gradients = 0 if steps_early else trained * gradient_bytes
    if config.distributed.fsdp and (processes := environment.process_count()) > 1:
        # A block's weights and gradients are whole while it computes, and the next one's weights are gathered
        # meanwhile. With gradient accumulation, whole gradients are added up before they are sharded.
        bytes_per_weight = fp8_storage.storage_type(config).itemsize
        largest = max(block.parameters for block in model.blocks)
        weights = weights / processes + 2 * largest * bytes_per_weight
        accumulated = config.steps.gradient_accumulation_steps > 1
        shared = model.denoiser / processes + (model.denoiser if accumulated else largest)
        gradients = (trained - model.denoiser + shared) * gradient_bytes
        states *= (trained - model.denoiser * (1 - 1 / processes)) / trained
    parts = {
        "model": weights + sum(path.stat().st_size for path in assistant_lora(config) if path.is_file()),
        "text encoders": 0 if config.cache.text else model.encoders * (1 if config.precision.fp8_encoders else 2),
        "VAE": 0 if config.cache.latents else model.vae * 4,
        "what learns": trained * 4 if config.adapters else 0,
        "gradients": gradients,
        "optimizer": states,
        "activations": _activation_memory(config, model, size),
        "driver": CONTEXT,
    }
    graphs = _recording_memory(config, model, trained, parts["activations"])
    if not config.compile.records_graphs:  # recorded only if memory is left
        graphs = min(graphs, max(0, (memory or 0) * BYTES_PER_GIB * FILLED / SLACK - sum(parts.values())))
    return {**parts, "CUDA graphs": graphs}


def _recording_memory(config: RunConfig, model: ModelStats, trained: float, activations: float) -> float:
    """Return the memory that CUDA graphs take in addition to the steps that they record.

    A recorded backward pass ends with all gradients, in the place of activations, and copies them to buffers shared by
    all sizes. Other trainings have these gradients anyway; an optimizer that steps early would not.
    """
    several = environment.process_count() > 1 and (config.distributed.fsdp or config.optim.stepped_early)
    if several or (config.compile.why_not_recorded(config) and not config.compile.records_graphs):
        return 0
    gradients = trained * (4 if config.adapters else fp8_storage.storage_type(config).itemsize)
    shared = gradients if config.optim.stepped_early else 0
    convolutions = config.compile.compile and any(block.is_convolution for block in model.blocks)
    return shared + max(0, gradients - activations) + convolutions * RECORDED


def _trained_bytes(config: RunConfig) -> int:
    return (trained_dtype(config) if config.adapters else fp8_storage.storage_type(config)).itemsize


def _state_bytes(config: RunConfig, optimizer: str) -> float:
    half = _trained_bytes(config) == 2 and "8bit" not in optimizer
    return STATES.get(optimizer, USUAL_STATES) * (0.5 if half else 1)


def state_size(config: RunConfig, model: ModelStats) -> float:
    """Return the approximate bytes of a state to resume from: trained weights, their average, and optimizer states."""
    optimizer = (config.optim.optimizer or "AdamW").lower().removeprefix("paged")  # paging does not matter on disk
    weight = 4 if config.adapters else fp8_storage.storage_type(config).itemsize
    average = 4 if config.optim.ema_decay else 0
    return trained_parameters(config, model) * (weight + average + _state_bytes(config, optimizer))


def _bytes_in_blocks(config: RunConfig) -> float:
    """Return the bytes of a weight of a linear layer in the blocks."""
    precision = config.precision
    if config.adapters and precision.nf4_denoiser:
        return nf4.BYTES
    in_8_bits = config.adapters and (precision.fp8_denoiser or precision.int8_base)
    return 1 if in_8_bits else fp8_storage.storage_type(config).itemsize


def _weight_memory(config: RunConfig, model: ModelStats) -> float:
    bytes_per_weight, in_blocks = fp8_storage.storage_type(config).itemsize, _bytes_in_blocks(config)
    of_convolution = max(1, in_blocks)  # never in 4 bits
    offloads = config.memory.moves_modulation(config)
    sizes: dict[str, list[int]] = {}  # by class, the largest block first
    for block in sorted(model.blocks, key=lambda block: -block.parameters):
        if not block.is_convolution:
            sizes.setdefault(block.kind, []).append(block.parameters - block.modulation * offloads)
    swappable = [size for group in sizes.values() for size in group]
    swapped = min(config.memory.blocks_to_swap or 0, max(len(swappable) - 2, 0))
    plan = model.swap_plan(swapped) if swapped else {}
    swapped_out = sum(sum(sizes.get(kind, ())[:number]) for kind, number in plan.items())
    leaving = swapping.LEAVING if not config.adapters and config.optim.stepped_early else 0
    largest = max((sizes[kind][0] for kind, number in plan.items() if number and kind in sizes), default=0)
    slots = (swapping.SLOTS + leaving) * largest
    convolutions = sum(block.parameters for block in model.blocks if block.is_convolution)
    resident = sum(swappable) - swapped_out + min(slots, swapped_out)
    modulation = swapping.SLOTS * max((block.modulation for block in model.blocks), default=0) * offloads
    of_blocks = (resident + modulation) * in_blocks + convolutions * of_convolution
    return of_blocks + _transposed_memory(config, model) + model.outside * bytes_per_weight


def _transposed_memory(config: RunConfig, model: ModelStats) -> float:
    """Return the bytes of fp8 weights that are stored transposed as well."""
    precision = config.precision
    multiplies = config.adapters and precision.fp8_denoiser and precision.fp8_compute
    if not (multiplies and precision.fp8_transposed_weights) or config.memory.blocks_to_swap:
        return 0
    return sum(block.parameters - block.modulation for block in model.blocks if not block.is_convolution)


def _offloaded_modulation(config: RunConfig, model: ModelStats) -> float:
    """Return the bytes of modulation layers in CPU memory."""
    if not config.memory.moves_modulation(config):
        return 0
    return sum(block.modulation for block in model.blocks) * _bytes_in_blocks(config)


def trained_parameters(config: RunConfig, model: ModelStats) -> float:
    """Return the number of trained parameters."""
    if isinstance(config, AdapterRun):
        rank = config.network.network_dim or 4
        if not config.network.module.startswith("networks."):  # to LyCORIS 100000 means full matrices
            rank = min(rank, LOKR_FULL_RANK)
        return rank * sum(block.fan_in_plus_out for block in model.blocks)
    if isinstance(config, EmbeddingRun):
        return config.embedding.num_vectors_per_token * WORD
    if isinstance(config, ControlRun):
        width, channels = config.control.network_dim or 0, config.control.cond_emb_dim or 0
        blocks = [block for block in model.blocks if not block.is_convolution]
        # Four layers of each block; about half of the blocks are in the decoder, which has none.
        return sum(4 * width * (2 * block.width + width + channels) for block in blocks) / 2
    encoders = model.encoders if config.trains_whole_encoders else 0
    return model.denoiser + encoders


def saved_bytes(config: RunConfig) -> int:
    usual = 2 if config.precision.mixed_precision != "no" else 4
    return {"fp16": 2, "bf16": 2, "float": 4}.get(config.save.save_precision or "", usual)


def _activation_memory(config: RunConfig, model: ModelStats, size: tuple[int, int]) -> float:
    """Return memory kept for the backward pass; with checkpointing the inputs of blocks, and one block's
    activations.
    """
    memory, bytes_per_value = config.memory, BYTES[config.precision.mixed_precision]
    compiled = COMPILED_ACTIVATIONS if config.compile.compile else 1.0
    batch = config.data.train_batch_size
    activations, checkpoints, largest_input, largest_block = 0.0, 0.0, 0.0, 0.0
    for block in model.blocks:
        stream = count_block_tokens(config, block, size) * block.width * bytes_per_value * batch
        inside = stream * block.cost.activations * compiled
        activations, largest_block = activations + inside, max(largest_block, inside)
        kept = CHECKPOINT_WITH_ATTENTION if memory.checkpoint_keep_attention else 1
        # Convolutions are not recomputed: their outputs are kept for the decoder.
        checkpoints += stream * (2 if block.is_convolution else kept)
        largest_input = max(largest_input, stream)
    if config.compile.keeps_by_budget:
        in_8_bits = config.precision.fp8_compute or config.precision.int8_compute
        share = config.compile.compile_activation_budget - LESS_IN_8_BITS * in_8_bits
        return max(activations * share, largest_block + checkpoints)
    if not memory.checkpointing:
        return activations
    if memory.cpu_offload_checkpointing:
        return largest_block + min(IN_TRANSIT * largest_input, checkpoints)
    return largest_block + checkpoints


# ---- time


def operations(config: RunConfig, model: ModelStats, size: tuple[int, int]) -> float:
    images = config.data.train_batch_size * config.steps.gradient_accumulation_steps
    return operations_of_image(config, model, size) * images


def last_run_rate(config: RunConfig, gpu: str, model: ModelStats) -> tuple[float, MessageLike]:
    """Return this GPU's rate in an earlier run of this family, in operations per second, and that run; 0
    without one.
    """
    for run in reader.runs()[:RUNS] if gpu else ():  # the newest first
        pace = reader.progress(run.folder).update().last.get("s_it")
        if (run.facts.get("hardware") or {}).get("gpu") != gpu or not isinstance(pace, int | float) or pace <= 0:
            continue
        try:
            earlier = build_config(type(config), read_toml(run.folder / layout.TOML), notes=[])
        except ValueError:
            continue
        if earlier.family == config.family and earlier.compile.compile == config.compile.compile:
            stats = model if earlier.model == config.model else model_stats(earlier)
            count = operations(earlier, stats, earlier.data.size or (1024, 1024))
            template = "the speed of your run {run} ({pace} s a step)"
            return count / pace, Message(template, run=run.name, pace=f"{pace:.2g}")
    return 0.0, ""


def unused_memory(config: RunConfig, memory: float | None) -> MessageLike:
    """Say that a GPU of `memory` GiB has more than the training takes, "" if it has not."""
    limit = config.memory.gpu_memory_limit
    if not limit or not memory or limit >= memory:
        return ""
    template = "gpu_memory_limit: uses at most {limit} of {memory} GB; without it, training uses more if that is faster"
    return Message(template, limit=f"{limit:g}", memory=f"{memory:.0f}")
