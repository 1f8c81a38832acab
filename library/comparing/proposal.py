"""Which file to take, and why: a rule over numbers. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass

from library.config.problems import Message, counted, join_messages

CLOSE = 0.002  # share of the lowest loss within which two files are equally good
FEWEST_COPIES = "lowest held-out loss of the files that copy the fewest training pictures"
FEWEST_OF_TRAINED = "lowest loss, on images that it was trained on, of the files that copy the fewest training pictures"


@dataclass(frozen=True)
class FileScore:
    """What was measured of one file; None where it could not be."""

    title: Message
    loss: float | None
    likeness: float | None
    copies: int  # different training pictures that its pictures nearly are


@dataclass(frozen=True)
class ProposedFile:
    """The number of a column, and why; None where nothing speaks for one."""

    column: int | None
    reason: Message


def proposed(scores: Sequence[FileScore], held_out: bool) -> ProposedFile:
    """The file with the lowest loss of those that copy the fewest training pictures; without losses the one that is
    most like them. `held_out` says that no file was trained on what its loss is measured on."""
    every = [(score.loss, at) for at, score in enumerate(scores) if score.loss is not None]
    if not every:
        return _by_likeness(scores)
    fewest = min(scores[at].copies for _, at in every)
    known = [(loss, at) for loss, at in every if scores[at].copies == fewest]
    lowest, best = min(known)
    if held_out and len(every) > 1 and max(every)[0] <= min(every)[0] * (1 + CLOSE):
        best = known[0][1]
        parts = [Message("the held-out losses of all files hardly differ, so an early one")]
    elif min(every)[0] < lowest:
        parts = [Message(FEWEST_COPIES if held_out else FEWEST_OF_TRAINED)]
    else:
        parts = [
            Message("lowest held-out loss") if held_out else Message("lowest loss on images that it was trained on")
        ]
    parts += _about_copies(scores, best)
    if not held_out:
        parts.append(Message("such a loss favours later files: hold images out with validation_split"))
    return ProposedFile(best, Message("{file}: {reasons}", file=scores[best].title, reasons=join_messages(parts, "; ")))


def _by_likeness(scores: Sequence[FileScore]) -> ProposedFile:
    known = [(score.copies, -score.likeness, at) for at, score in enumerate(scores) if score.likeness is not None]
    if not known:
        return ProposedFile(None, Message("Nothing could be measured: choose by the pictures."))
    best = min(known)[-1]
    parts = [Message("most like the training pictures"), *_about_copies(scores, best)]
    return ProposedFile(best, Message("{file}: {reasons}", file=scores[best].title, reasons=join_messages(parts, "; ")))


def _about_copies(scores: Sequence[FileScore], best: int) -> list[Message]:
    """What speaks against the files that copy more."""
    if scores[best].copies:
        pictures = counted(scores[best].copies, "training picture")
        return [Message("it copies {pictures}, and no other file fewer", pictures=pictures)]
    later = max((score.copies for score in scores[best + 1 :]), default=0)
    earlier = max((score.copies for score in scores[:best]), default=0)
    made = [Message("later files copy {pictures}", pictures=counted(later, "training picture"))] * bool(later)
    return made + [Message("earlier files copy {pictures}", pictures=counted(earlier, "training picture"))] * bool(
        earlier
    )
