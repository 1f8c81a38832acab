"""The progress of a command in a shell, as one line that is written again and again."""

import sys

from library.config.problems import Message, MessageLike, Report


def progress_line() -> Report:
    """A report to stderr, beside the result: a line that is rewritten in a terminal, and in a file or a pipe a line for
    each phase, however many images it has."""
    phase: list[MessageLike] = [""]
    width = [0]  # of the line that is in the terminal now; 0: none is open

    def report(what: Message, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            if what != phase[0]:
                print(f"{what} ({total})" if total > 1 else str(what), file=sys.stderr, flush=True)
        else:
            if width[0] and what != phase[0]:
                print(file=sys.stderr)
                width[0] = 0
            line = f"{what} {done} / {total}" if total > 1 else str(what)
            is_over = done >= total
            print(f"\r{line.ljust(width[0])}", end="\n" if is_over else "", file=sys.stderr, flush=True)
            width[0] = 0 if is_over else len(line)
        phase[0] = what

    return report
