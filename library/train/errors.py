"""Turn fatal errors of a training into advice for its user."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from library.config import phases
from library.config.environment import first_process, lacks_memory
from library.config.problems import FAILS_AGAIN, ConfigError, Message, MessageLike, Problem, either
from library.config.run_config import RunConfig
from library.data.folders import some
from library.data.not_finite import NotFiniteError
from library.families.shared import file_identity
from library.measuring.candidates import advise_changes, saving_memory

# Options that reduce the memory of steps, but not of samples.
OF_STEPS = {"gradient_checkpointing", "compile_activation_budget", "train_batch_size", "cpu_offload_checkpointing"}
MAX_SKIPPED_STEPS = 100  # steps in a row that a gradient scaler may skip; it halves the scale each time
NOT_FINITE = {
    "loss NaN": "the loss of step {step} is NaN",
    "loss infinite": "the loss of step {step} is infinite",
    "gradient NaN": "the gradient of step {step} is NaN",
    "gradient infinite": "the gradient of step {step} is infinite",
}
Newest = Mapping[str, Path]  # "file" and "state" -> what was saved last

# Error messages of torch.distributed's backends after the loss of a process contain one of these.
PROCESS_GONE_SIGNS = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "remote process exited",
    "was aborted",
    "Connection was likely closed",
)
TIMEOUT_SIGNS = ("Timed out waiting", "collective operation timeout", "wait timeout after")


def explain_error(error: BaseException, config: RunConfig, doing: Message, newest: Newest) -> BaseException:
    """Return a ConfigError with advice for this error; the error itself if there is none.

    `doing` is the phase or step in which it was raised, `newest` what was saved last.
    """
    if isinstance(error, torch.OutOfMemoryError):
        if not (ways := [*_smaller(config, doing)]):
            return _failing_again("the GPU ran out of memory ({doing}){then}", doing=doing, then=_go_on(newest))
        return _failing_again(
            "the GPU ran out of memory ({doing}): {ways}{then}", doing=doing, ways=either(ways), then=_go_on(newest)
        )
    if lacks_memory(error):
        ways = Message("use fewer data loader workers, cache to disk instead of in memory, or close other programs")
        return _failing_again(
            "the computer ran out of CPU memory ({doing}): {ways}{then}", doing=doing, ways=ways, then=_go_on(newest)
        )
    if isinstance(error, NotFiniteError):
        return damaged_model(error)
    if torch.distributed.is_initialized() and any(sign in str(error) for sign in PROCESS_GONE_SIGNS):
        return process_gone(doing, newest)
    if torch.distributed.is_initialized() and any(sign in str(error) for sign in TIMEOUT_SIGNS):
        return process_silent(doing, newest)
    return error


def _failing_again(template: str, **arguments: Any) -> ConfigError:
    return ConfigError(Problem("", template, code=FAILS_AGAIN, **arguments))


def damaged_model(error: NotFiniteError) -> ConfigError:
    """Return the error for NaN or infinity in the model's own weights if that is the cause, else the same error."""
    files = file_identity.watched()
    return (files.damaged() if files and first_process() else None) or error


class ProcessGone(ConfigError):
    """Another process of the training has ended."""


class ProcessSilent(ProcessGone):
    """Another process of the training no longer responds."""


def process_silent(doing: Message, newest: Newest) -> ProcessSilent:
    """Return the error for a timeout while waiting for another process."""
    return ProcessSilent(
        "another process of this training has not answered in time ({doing}): it hangs, or its machine or the network "
        "is gone; ddp_timeout is the limit in minutes{then}",
        doing=doing,
        then=_go_on(newest),
    )


def process_gone(doing: Message, newest: Newest, reported: str = "") -> ProcessGone:
    """Return the error for another process that has ended; `reported` is its own error, if it reported one."""
    if reported:
        return ProcessGone("{said}{then}", said=reported, then=_go_on(newest))
    return ProcessGone(
        "another process of this training has ended, and none continues without it ({doing}); its own last lines, or "
        "the system's log, say why{then}",
        doing=doing,
        then=_go_on(newest),
    )


class NonFiniteWatch:
    """Detects losses and gradients that are NaN or infinite."""

    def __init__(self, scaled: bool) -> None:
        self._scaled = scaled  # with scaled losses (fp16), the scaler finds its scale by infinite gradients
        self._skipped = 0

    def check(self, line: Mapping[str, Any]) -> str:
        """Return which number ends the training: "loss", "gradient", "gradients" of too many steps, or ""."""
        if not math.isfinite(line["loss"]):
            return "loss"
        if math.isfinite(line.get("grad_norm", 0.0)):
            self._skipped = 0
            return ""
        self._skipped += 1
        if self._scaled:
            return "gradients" if self._skipped == MAX_SKIPPED_STEPS else ""
        return "gradient"


def non_finite_message(
    what: str, line: Mapping[str, Any], images: list[str], config: RunConfig, newest: Newest
) -> Problem:
    """Return the problem of a loss or gradient that is NaN or infinite; `images` are those with such a loss."""
    ways = [Message("lower the learning rate")]
    if config.precision.mixed_precision == "fp16":
        ways.append(Message("use mixed_precision bf16, whose range is larger"))
        if not config.cache.latents and config.model.float32_vae is False:
            ways.append(Message("use no_half_vae"))
    if images:
        ways.append(Message("replace these images"))
    if what == "gradients":
        template = "the gradients of {count} steps in a row are NaN or infinite, so nothing is trained"
        problem = Message(template, count=MAX_SKIPPED_STEPS)
    else:
        value = line["loss"] if what == "loss" else line["grad_norm"]
        problem = Message(NOT_FINITE[f"{what} {'NaN' if math.isnan(value) else 'infinite'}"], step=line["step"])
    problem = Message("{number} with {images}", number=problem, images=some(images, 8)) if images else problem
    then = _go_on(newest)
    return Problem("", "{about}: {ways}{then}", about=problem, ways=either(ways), then=then, code=FAILS_AGAIN)


def weights_problem(parameters: list[torch.nn.Parameter], step: int, newest: Newest) -> MessageLike:
    """Return why these weights must not be saved, "" if they may be. Synchronises with the device."""
    finite_flags: dict[torch.device, list[torch.Tensor]] = {}  # swapped blocks are in host memory
    for p in parameters:
        finite_flags.setdefault(p.device, []).append(p.detach().isfinite().all())
    if all(torch.stack(flags).all() for flags in finite_flags.values()):
        return ""
    template = "after step {step} the weights hold NaN or infinity: lower the learning rate{then}"
    return Problem("", template, step=step, then=_go_on(newest), code=FAILS_AGAIN)


def _smaller(config: RunConfig, doing: Message) -> Iterator[MessageLike]:
    """Yield advice for settings that need less memory in this phase."""
    if doing == phases.CACHING_LATENTS:
        yield Message("lower resolution")  # smaller batches were tried
        return
    if doing == phases.CACHING_CAPTIONS:
        yield Message("lower text_encoder_batch_size or train_batch_size")
        return
    if doing == phases.ENCODING_PROMPTS:
        return
    if doing == phases.GENERATING_SAMPLES:
        yield Message("ask for smaller sample images (--w and --h in the prompt file)")
        yield from (
            advise_changes(changes, config) for changes in saving_memory(config) if not changes.keys() <= OF_STEPS
        )
        return
    yield from (advise_changes(changes, config) for changes in saving_memory(config))
    yield Message("lower resolution")


def _go_on(newest: Newest) -> MessageLike:
    """Return the end of an error message: the state or file to continue from."""
    if state := newest.get("state"):
        return Message("; resume from {state}", state=state)
    if file := newest.get("file"):
        return Message("; the last saved file is {file}", file=file)
    return ""
