"""The progress of a command in a shell, as one line that is written again and again."""

import sys

from library.config.problems import Message, MessageLike, Report


def progress_line() -> Report:
    """Return a report that writes to stderr, apart from the result: one line that is rewritten in a terminal, and one
    line per phase in a file or a pipe, however many images it has."""
    phase: list[MessageLike] = [""]
    width = [0]  # of the line that is in the terminal now; 0: none is open

    def report(message: Message, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            if message != phase[0]:
                print(f"{message} ({total})" if total > 1 else str(message), file=sys.stderr, flush=True)
        else:
            if width[0] and message != phase[0]:
                print(file=sys.stderr)
                width[0] = 0
            line = f"{message} {done} / {total}" if total > 1 else str(message)
            is_over = done >= total
            print(f"\r{line.ljust(width[0])}", end="\n" if is_over else "", file=sys.stderr, flush=True)
            width[0] = 0 if is_over else len(line)
        phase[0] = message

    return report
