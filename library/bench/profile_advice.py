"""What a profile means: operations sorted into kinds, and sentences on what takes the time and what to change.

Works on plain tables without torch, so that tests can apply the rules to invented ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from library.bench import report
from library.config import compile_rules
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import Message, counted, join_messages
from library.config.run_config import RunConfig
from library.config.schema import option_values
from library.measuring.candidates import format_changes

SMALL_KINDS = ("elementwise", "norms and reductions", "copies", "bookkeeping")
IDLE = 0.15  # share of a step; any step has less than this at its edges
ADVISED_OPTIONS = (
    "compile",
    "compile_mode",
    "gradient_checkpointing",
    "checkpoint_keep_attention",
    "cpu_offload_checkpointing",
    "blocks_to_swap",
    "cuda_cudnn_benchmark",
    "cuda_allow_tf32",
    "fp8_base",
    "fp8_compute",
    "mixed_precision",
    "train_batch_size",
    "optimizer_type",
    "compile_activation_budget",
    "compile_scope",
    "compile_blocks",
    "network_module",
    "int8_base",
)
MAY_KEEP_A_SHARE = "may_keep_a_share"  # beside these: whether compile_activation_budget goes with the others


@dataclass(frozen=True)
class Advice:
    """One finding: its rule, its share of a step, its sentence, and options that would change it."""

    rule: str
    share: float
    text: Message
    options: JsonMapping = field(default_factory=dict)


def settings_for_advice(config: RunConfig) -> JsonObject:
    """Return the options that the rules read, and MAY_KEEP_A_SHARE."""
    settings = {name: value for name, value in option_values(config).items() if name in ADVISED_OPTIONS}
    without_offloading = replace(config, memory=replace(config.memory, cpu_offload_checkpointing=False))
    budget_is_refused = any(compile_rules.budget_problems(config.compile, without_offloading))
    return {**settings, MAY_KEEP_A_SHARE: config.compile.compile and not budget_is_refused}


# ---- the rules


def judge(facts: JsonMapping) -> list[Advice]:
    findings = [finding for rule in RULES for finding in rule(facts, facts.get("set", {}))]
    return [_dominant(facts), *sorted(findings, key=lambda finding: -finding.share)]


Facts = JsonMapping


def _waits(facts: Facts) -> int:
    return facts["syncs"] if facts.get("idle") is not None else 0  # without a GPU nothing waits


def _starved(facts: Facts) -> bool:
    # The GPU is idle because the host waits for it, rather than because the host is slow.
    return (facts.get("idle") or 0.0) >= IDLE and _waits(facts) >= 10 and _waits(facts) * 50 >= facts["launches"]


def _dominant(facts: Facts) -> Advice:
    kinds, idle = facts["kinds"], facts.get("idle")
    if idle is not None and idle > 0.4:
        text = Message("Waiting dominates: the GPU is idle for {share} of a step.", share=f"{idle:.0%}")
        if _starved(facts):
            template = (
                "Waiting dominates: the GPU is idle for {share} of a step, as the CPU waits for it {count} times."
            )
            text = Message(template, share=f"{idle:.0%}", count=f"{_waits(facts):,}")
        return Advice("dominant", idle, text)
    first, share = next(iter(kinds.items()), ("nothing", 0.0))
    next_kinds = [
        Message("{kind} {share}", kind=Message(name), share=f"{part:.0%}") for name, part in list(kinds.items())[1:4]
    ]
    template = "{share} of the time goes into {first}; then {others}."
    if idle is not None:
        template = "{share} of the GPU's work goes into {first}; then {others}."
    elif facts.get("blind"):
        template = (
            "PyTorch's profiler may not look at this GPU, so this is the CPU's time: {share} of it goes into "
            "{first}; then {others}."
        )
    then = join_messages(next_kinds) if next_kinds else Message("nothing")
    return Advice("dominant", share, Message(template, share=f"{share:.0%}", first=Message(first), others=then))


def _waiting(facts: Facts, settings: Facts) -> Iterator[Advice]:
    idle = facts.get("idle") or 0.0
    if idle < IDLE:
        return
    cure, options = Message("larger batches give the GPU more to do for each of them"), {}
    if not settings.get("compile"):
        cure = Message("compile the blocks, which makes a few large kernels of many small ones")
        options = {"compile": True}
    elif settings.get("compile_mode") == "default" and not settings.get("blocks_to_swap"):
        cure = Message("if the images have few sizes, replay them as CUDA graphs; or use larger batches")
        options = {"compile_mode": "reduce-overhead"}
    template = "The GPU is idle for {share} of a step, while the CPU starts {count} kernels: {cure}."
    text = Message(template, share=f"{idle:.0%}", count=f"{facts['launches']:,}", cure=cure)
    yield Advice("launches", idle, text, options)


def _advise_on_waits(facts: Facts, settings: Facts) -> Iterator[Advice]:
    if (waits := _waits(facts)) < 2:
        return
    share = facts["idle"] if _starved(facts) else min(0.5, 0.02 * waits)
    name = str(settings.get("optimizer_type") or "AdamW").rpartition(".")[2]
    cure = Message("Look for item and nonzero in the trace.")
    if not name.lower().startswith("adamw"):
        template = "{optimizer} may be what reads them: try AdamW. Else look for item and nonzero in the trace."
        cure = Message(template, optimizer=name)
    template = "The CPU waits for the GPU {count} times in a step, to read values from it; the GPU is idle then. {cure}"
    yield Advice("syncs", share, Message(template, count=f"{waits:,}", cure=cure))


def _swapping(facts: Facts, settings: Facts) -> Iterator[Advice]:
    moved = sum(facts["copies"][way]["share"] for way in ("to device", "to host"))
    if moved < 0.1:
        return
    cure, options = Message("nothing is swapped, so look in the trace for what is copied"), {}
    if swapped := settings.get("blocks_to_swap"):
        cure = Message("swap fewer than {blocks}, as far as memory allows", blocks=counted(swapped, "block"))
    elif settings.get("cpu_offload_checkpointing"):
        cure = Message("keep checkpoints on the GPU, if they fit")
        options = {"cpu_offload_checkpointing": False, "gradient_checkpointing": True}
    template = "Copies between CPU and GPU take as long as {share} of the GPU's work: {cure}."
    yield Advice("swapping", moved, Message(template, share=f"{moved:.0%}", cure=cure), options)


def _fusing(facts: Facts, settings: Facts) -> Iterator[Advice]:
    small = sum(facts["kinds"].get(name, 0.0) for name in SMALL_KINDS)
    if small < 0.25:
        return
    stays = settings.get("blocks_to_swap") or settings.get("gradient_checkpointing")
    if not settings.get("compile"):
        cure, options = Message("compiling fuses most of them"), {"compile": True}
    elif settings.get("compile_scope") == "inner":
        cure = Message("they are outside what is compiled, so compile whole blocks")
        options = {"compile_scope": "blocks"}
    elif settings.get("compile_blocks"):
        cure, options = Message("let compile_blocks name more blocks, or none, which compiles all"), {}
    elif settings.get("compile_scope") == "blocks" and not stays:
        cure = Message("they are outside the compiled blocks, so compile the model as a whole")
        options = {"compile_scope": "model"}
    else:
        return
    template = "Small operations (elementwise, norms, copies) take {share}: {cure}."
    yield Advice("fusing", small, Message(template, share=f"{small:.0%}", cure=cure), options)


def _streaming(facts: Facts, settings: Facts) -> Iterator[Advice]:
    share = facts["kinds"].get("compiled kernels", 0.0)
    if share < 0.5 or (facts.get("idle") or 0.0) >= IDLE:
        return
    if _recomputes_all(settings):
        cure = Message("part of them recompute activations; keep these, as far as memory allows")
        options = _keeping_more(settings)
    elif facts.get("idle") is not None and settings.get("compile_mode") == "default":
        cure = Message("let the compiler try several versions of each, which takes minutes once")
        options = {"compile_mode": "max-autotune-no-cudagraphs"}
    else:
        return
    template = "Compiled kernels take {share}, mostly for reading and writing memory: {cure}."
    yield Advice("streaming", share, Message(template, share=f"{share:.0%}", cure=cure), options)


def _advise_on_attention(facts: Facts, settings: Facts) -> Iterator[Advice]:
    share = facts["kinds"].get("attention", 0.0)
    if share < 0.3 and next(iter(facts["kinds"]), "") != "attention":
        return
    if _recomputes_all(settings) and not settings.get("checkpoint_keep_attention"):
        template = "Attention takes {share}, part of it to recompute: keep its outputs, which cost little memory."
        options = {"checkpoint_keep_attention": True}
    else:
        template = (
            "Attention takes {share}: it grows with the square of an image's area, so smaller images gain most. "
            "kohya doctor times the kernels that attention_kernel can choose."
        )
        options = {}
    yield Advice("attention", share, Message(template, share=f"{share:.0%}"), options)


def _optimizing(facts: Facts, settings: Facts) -> Iterator[Advice]:
    share = facts["kinds"].get("optimizer", 0.0)
    if share >= 0.1:
        template = (
            "The optimizer takes {share}: accumulate gradients over several batches, or choose a cheaper one "
            "(Adafactor, AdamW8bit)."
        )
        yield Advice("optimizer", share, Message(template, share=f"{share:.0%}"))


def _convolving(facts: Facts, settings: Facts) -> Iterator[Advice]:
    share = facts["kinds"].get("convolution", 0.0)
    if share >= 0.25 and facts.get("idle") is not None and not settings.get("cuda_cudnn_benchmark"):
        template = "Convolutions take {share}: let cuDNN try its kernels, if the data set has few image sizes."
        text = Message(template, share=f"{share:.0%}")
        yield Advice("convolution", share, text, {"cuda_cudnn_benchmark": True})


def _multiplying(facts: Facts, settings: Facts) -> Iterator[Advice]:
    share, idle = facts["kinds"].get("matrix products", 0.0), facts.get("idle")
    if share < 0.5 or (idle or 0.0) >= IDLE:
        return
    if idle is not None and settings.get("mixed_precision") == "no":
        text = Message("Matrix products in float32 take {share}: bf16 is many times as fast.", share=f"{share:.0%}")
        yield Advice("precision", share, text, {"mixed_precision": "bf16"})
        return
    template, options = "Matrix products take {share}. Only less work is faster: smaller images, shorter captions.", {}
    if _could_use_8_bits(facts, settings):
        template = "Matrix products take {share}: with a frozen base they are faster in 8 bits, if a little less exact."
        options = {"fp8_base": True, "fp8_compute": True}
    yield Advice("products", share, Message(template, share=f"{share:.0%}"), options)


def _could_use_8_bits(facts: Facts, settings: Facts) -> bool:
    capability = str((facts.get("machine") or {}).get("capability") or "0.0").split(".")
    frozen = bool(settings.get("network_module")) and not (settings.get("fp8_compute") or settings.get("int8_base"))
    fast = (
        bool(settings.get("compile"))
        and settings.get("mixed_precision") == "bf16"
        and tuple(map(int, capability)) >= (8, 9)
    )
    return facts.get("idle") is not None and frozen and fast


def _recomputing(facts: Facts, settings: Facts) -> Iterator[Advice]:
    used, available = facts.get("peak_gb") or 0.0, facts.get("memory_gb") or 0.0
    if _recomputes_all(settings) and used < 0.5 * available:
        template = (
            "{used} of {memory} GB are used, while activations are recomputed: switch gradient_checkpointing off, or "
            "keep the outputs of attention."
        )
        options = _keeping_more(settings)
        if "compile_activation_budget" in options:
            template = (
                "{used} of {memory} GB are used, while activations are recomputed: let compiled blocks keep half of "
                "them."
            )
        text = Message(template, used=f"{used:.1f}", memory=f"{available:.0f}")
        yield Advice("recompute", 0.25, text, options)


def _recomputes_all(settings: Facts) -> bool:
    """Return whether blocks recompute all activations although they could keep some: swapped ones could not."""
    by_budget = settings.get("compile") and settings.get("compile_activation_budget", 1.0) < 1
    return bool(settings.get("gradient_checkpointing") and not by_budget and not settings.get("blocks_to_swap"))


def _keeping_more(settings: Facts) -> JsonObject:
    """Return options that recompute fewer activations: half of them if compiled blocks may keep a share, else none."""
    fewer = {"compile_activation_budget": 0.5} if settings.get(MAY_KEEP_A_SHARE) else {"gradient_checkpointing": False}
    return fewer | ({"cpu_offload_checkpointing": False} if settings.get("cpu_offload_checkpointing") else {})


def _casting(facts: Facts, settings: Facts) -> Iterator[Advice]:
    share, casts = facts["copies"]["within"]["share"], facts["casts"]
    if share >= 0.1 and casts >= 50 and settings.get("compile"):
        template = (
            "{count} casts and copies outside compiled blocks take {share}: keep what is frozen in the type that is "
            "computed in."
        )
        yield Advice("casts", share, Message(template, count=f"{casts:,}", share=f"{share:.0%}"))


RULES: tuple[Callable[[Facts, Facts], Iterator[Advice]], ...] = (
    _advise_on_waits,
    _waiting,
    _swapping,
    _fusing,
    _streaming,
    _advise_on_attention,
    _optimizing,
    _convolving,
    _multiplying,
    _recomputing,
    _casting,
)


# ---- as text


def profile_text(facts: JsonMapping) -> str:
    """Return the verdict and the tables, for a shell."""
    at = f"{facts['way']['name']} at {facts['resolution']}"
    title, where = report.heading(facts)
    idle = f", the GPU idle for {facts['idle']:.0%}" if facts.get("idle") is not None else ""
    counts = f"{facts['casts']:,} casts"
    if idle:
        counts = f"{facts['launches']:,} kernel launches, {facts['syncs']} waits, {facts['reads']} reads, {counts}"
    kinds = [["kind", "share"], *([name, f"{share:.1%}"] for name, share in facts["kinds"].items())]
    titles = ["operation", "kind", "calls", "ms", "share"]
    operations = [
        [o["name"][:60], o["kind"], f"{o['calls']:g}", f"{o['ms']:.3g}", f"{o['share']:.1%}"]
        for o in facts["operations"][:15]
    ]
    return "\n".join(
        [
            f"{title}, {at}",
            str(where),
            "",
            f"A step takes {report.milliseconds(facts['step_ms'])}{idle}; {counts} in each",
            "",
            *report.align_columns(kinds),
            "",
            *report.align_columns([titles, *operations]),
            "",
            *(
                f"{number}. {finding['text']}{change(finding['options'])}"
                for number, finding in enumerate(facts["verdict"], start=1)
            ),
        ]
    )


def change(options: JsonMapping) -> str:
    return f" ({format_changes(options)})" if options else ""
