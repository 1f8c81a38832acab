"""Which file to choose, and why: a rule over numbers. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from library.config.problems import Message, counted, join_messages

CLOSE = 0.002  # losses within this share of the lowest count as equal
FEWEST_COPIES = "lowest held-out loss of the files that copy the fewest training images"
FEWEST_OF_TRAINED = "lowest loss, on images that it was trained on, of the files that copy the fewest training images"

ONLY_FILE = "{file} is the only file compared: a lower save_every_n_steps saves more of them"


@dataclass(frozen=True)
class FileScore:
    """The measurements of one file; None if they failed."""

    title: Message
    loss: float | None
    likeness: float | None
    copies: int  # number of training images that its samples nearly copy
    is_base: bool = False  # measured for comparison, and never proposed


@dataclass(frozen=True)
class ProposedFile:
    """The number of a column, and why; None without a reason to choose one."""

    column: int | None
    reason: Message


def propose_file(scores: Sequence[FileScore], held_out: bool) -> ProposedFile:
    """Return the file with the lowest loss among those that copy the fewest training images; without losses the most
    similar one. `held_out`: no file was trained on the images of its loss.
    """
    losses = [(score.loss, at) for at, score in enumerate(scores) if score.loss is not None and not score.is_base]
    if not losses:
        return _propose_by_likeness(scores)
    of_base = _about_base(scores, min(losses)[0])
    if _has_one_file(scores):
        return _propose_only_file(scores, losses[0][1], of_base)
    fewest_copies = min(scores[at].copies for _, at in losses)
    candidates = [(loss, at) for loss, at in losses if scores[at].copies == fewest_copies]
    lowest, best = min(candidates)
    if held_out and len(losses) > 1 and max(losses)[0] <= min(losses)[0] * (1 + CLOSE):
        best = candidates[0][1]
        parts = [Message("the held-out losses of all files hardly differ, so an early one")]
    elif min(losses)[0] < lowest:
        parts = [Message(FEWEST_COPIES if held_out else FEWEST_OF_TRAINED)]
    else:
        parts = [
            Message("lowest held-out loss") if held_out else Message("lowest loss on images that it was trained on")
        ]
    parts += [*_about_copies(scores, best), *of_base]
    if not held_out:
        parts.append(Message("such a loss favours later files: hold images out with validation_split"))
    return ProposedFile(best, Message("{file}: {reasons}", file=scores[best].title, reasons=join_messages(parts, "; ")))


def _propose_by_likeness(scores: Sequence[FileScore]) -> ProposedFile:
    candidates = [
        (score.copies, -score.likeness, at)
        for at, score in enumerate(scores)
        if score.likeness is not None and not score.is_base
    ]
    if not candidates:
        return ProposedFile(None, Message("Nothing could be measured: choose by the images."))
    best = min(candidates)[-1]
    if _has_one_file(scores):
        return _propose_only_file(scores, best, [])
    parts = [Message("most like the training images"), *_about_copies(scores, best)]
    return ProposedFile(best, Message("{file}: {reasons}", file=scores[best].title, reasons=join_messages(parts, "; ")))


def _has_one_file(scores: Sequence[FileScore]) -> bool:
    return sum(not score.is_base for score in scores) == 1


def _propose_only_file(scores: Sequence[FileScore], at: int, of_base: list[Message]) -> ProposedFile:
    copies = [Message("it copies {pictures}", pictures=counted(scores[at].copies, "training image"))]
    parts = [Message(ONLY_FILE, file=scores[at].title), *(copies if scores[at].copies else []), *of_base]
    return ProposedFile(at, join_messages(parts, "; "))


def _about_base(scores: Sequence[FileScore], lowest: float) -> list[Message]:
    """Return a remark if no file has a lower loss than the base model."""
    if any(score.is_base and score.loss is not None and score.loss <= lowest for score in scores):
        return [Message("no file has a lower loss than the base model")]
    return []


def _about_copies(scores: Sequence[FileScore], best: int) -> list[Message]:
    """Return the arguments against files that copy more."""
    if scores[best].copies:
        pictures = counted(scores[best].copies, "training image")
        return [Message("it copies {pictures}, and no other file fewer", pictures=pictures)]
    later = max((score.copies for score in scores[best + 1 :]), default=0)
    earlier = max((score.copies for score in scores[:best] if not score.is_base), default=0)
    arguments = []
    if later:
        arguments.append(Message("later files copy {pictures}", pictures=counted(later, "training image")))
    if earlier:
        arguments.append(Message("earlier files copy {pictures}", pictures=counted(earlier, "training image")))
    return arguments
