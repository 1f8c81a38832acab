"""Rules of compile options that other options of a run set: recording, the scope, the activation budget."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from library.config.compile_modes import RECORDED_MODES
from library.config.problems import Message, Problem, option_name
from library.config.run_config import RunConfig

if TYPE_CHECKING:
    from library.config.sections.compiling import Compile


def recording_problems(options: "Compile", run: RunConfig) -> Iterator[Problem]:
    """Yield problems of options that move what a CUDA graph needs at fixed addresses, and of options that switch
    recording both on and off.

    Only for options that record (`Compile.records_graphs`).
    """
    yield from _moving_problems(options, run)
    if options.cuda_graphs == "false":
        yield _unrecording_problem(options)


def _moving_problems(options: "Compile", run: RunConfig) -> Iterator[Problem]:
    alternative = _unrecorded_mode(options)
    option, setting, fix = "compile_mode", f"= {options.compile_mode}", {"compile_mode": alternative}
    if options.compile and "cudagraphs" in options.backends:
        option, setting, alternative, fix = "", "the backend cudagraphs", "inductor", {}
    elif options.cuda_graphs == "true" and options.compile and options.compile_mode == "max-autotune-no-cudagraphs":
        yield Problem(
            "cuda_graphs",
            "= true records what compile_mode = {mode} asks not to: use compile_mode = max-autotune, or auto",
            mode=options.compile_mode,
            fix={"cuda_graphs": "auto"},
            also="compile compile_mode",
        )
    elif options.cuda_graphs == "true":
        option, setting, alternative, fix = "cuda_graphs", "= true", "auto", {"cuda_graphs": "auto"}
    facts: dict[str, Any] = {"what": Message(setting), "other": alternative, "fix": fix, "topic": "compiling"}
    related_options = "compile_mode compile_backend compile_blocks compile cuda_graphs"
    if moving := run.memory.moves_weights(run):
        yield Problem(
            option,
            "{what} needs weights at fixed addresses, and {moving} moves them: use {other}",
            moving=moving,
            also=f"{related_options} {moving}",
            **facts,
        )
    if run.distributed.fsdp:
        yield Problem(
            option,
            "{what} needs weights at fixed addresses, and fsdp gathers them for each block: use {other}",
            also=f"{related_options} fsdp",
            **facts,
        )
    if run.memory.cpu_offload_checkpointing:
        yield Problem(
            option,
            "{what} needs inputs at fixed addresses, and cpu_offload_checkpointing moves them: use {other}, or "
            "gradient_checkpointing",
            also=f"{related_options} cpu_offload_checkpointing",
            **facts,
        )


def _unrecording_problem(options: "Compile") -> Problem:
    fix = {"cuda_graphs": "auto"}
    if "cudagraphs" in options.backends:
        return Problem(
            "cuda_graphs",
            "= false disables what the backend cudagraphs is for: use auto, or the backend inductor",
            also="compile compile_backend compile_blocks",
            fix=fix,
        )
    return Problem(
        "cuda_graphs",
        "= false disables what compile_mode = {mode} is for: use auto, or compile_mode = {other}",
        mode=options.compile_mode,
        other=_unrecorded_mode(options),
        also="compile compile_mode",
        fix=fix,
    )


def scope_problems(options: "Compile", run: RunConfig, by_kind: bool) -> Iterator[Problem]:
    """Yield options that exclude a scope other than blocks. `by_kind`: compile_from_step has steps of several kinds."""
    if options.compile_scope == "inner" and run.memory.checkpoint_keep_attention:
        yield _wide(
            "= inner cannot be used with checkpoint_keep_attention, which has to see the attention in the graph: "
            "use compile_scope = blocks",
            "checkpoint_keep_attention",
        )
    if options.compile_scope != "model":
        return
    if options.compile_blocks:
        yield _wide(
            "= model compiles all blocks as one, so compile_blocks has nothing to choose: drop one",
            "compile_blocks",
        )
    if by_kind:
        yield _wide(
            "= model compiles all blocks as one, so compile_from_step has no kinds to tell apart: write one step",
            "compile_from_step",
        )
    if moving := run.memory.moves_weights(run):
        yield _wide(
            "= model cannot be used with {moving}, as one graph of all blocks cannot move weights between "
            "them: use compile_scope = blocks",
            moving,
            moving=moving,
        )
    elif run.memory.recomputes_all(run):
        yield _wide(
            "= model cannot be used with gradient_checkpointing, which PyTorch cannot put in it: "
            "use compile_activation_budget, or compile_scope = blocks",
            "gradient_checkpointing",
        )


def budget_problems(options: "Compile", run: RunConfig) -> Iterator[Problem]:
    """Yield options that exclude an activation budget below 1."""
    for other in ("blocks_to_swap", "cpu_offload_checkpointing"):
        if getattr(run.memory, other):
            yield _budget(
                "cannot be used with {other}, which keeps no activations on the GPU: choose one",
                other,
                other=option_name(other),
            )
    if run.memory.checkpointing and options.compile_scope == "inner":
        yield Problem(
            "compile_activation_budget",
            "cannot be used with compile_scope = inner, where checkpoints are around compiled blocks: use "
            "compile_scope = blocks",
            also="compile compile_scope gradient_checkpointing",
            fix={"compile_scope": "blocks"},
        )
    for backend in sorted(options.backends - {"inductor", "aot_eager"}):
        yield _budget(
            "needs compile_backend = inductor; {backend} keeps everything", "compile_backend", backend=backend
        )
    # PyTorch may then draw another mask for the backward pass than for the forward one (pytorch#190717).
    network = getattr(run, "network", None)
    if network and (
        network.network_dropout or any("dropout=" in arg or "ggpo_" in arg for arg in network.network_args or ())
    ):
        yield _budget(
            "cannot be used with dropout or GGPO: set one of them to its default", "network_dropout network_args"
        )


def _unrecorded_mode(options: "Compile") -> str:
    return RECORDED_MODES.get(options.compile_mode, "max-autotune-no-cudagraphs")


def _wide(template: str, also: str, **arguments: Any) -> Problem:
    fix = {"compile_scope": "blocks"}
    return Problem("compile_scope", template, also=f"compile {also}", fix=fix, **arguments)


def _budget(template: str, also: str, **arguments: Any) -> Problem:
    fix = {"compile_activation_budget": 1.0}
    return Problem("compile_activation_budget", template, also=f"compile {also}", fix=fix, **arguments)
