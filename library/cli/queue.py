"""`kohya queue`: add trainings to the queue, list it and change it. It works without the page."""

import argparse
from collections.abc import Callable

from library.cli import shown
from library.cli.main import EXIT_DONE, EXIT_MISUSED
from library.config.arguments import Arguments
from library.config.problems import ConfigError, one_line
from library.runs import queue
from library.runs.queue_rows import QueueRow, queue_rows
from library.trainings.adding import check_and_add

ADD_USAGE = """kohya queue add RUN.toml [options]

Checks a training as kohya check does, and adds it to the queue. It starts when its turn comes, and does not need this
shell or the page. Options are those of the training and of the launcher, as in kohya train, and besides:
  --script SCRIPT       the training script, one of those that kohya train --help lists (default: detected)
  --first               before all others that wait
  --without-captions    add it even if no image has a caption, or caption files are not read
  --json                print one JSON object instead of text"""


def main(argv: list[str]) -> int:
    """Run a command about the queue. Return 0 on success, 1 on failure, 2 on wrong usage."""
    if argv and argv[0] == "add":
        return _add(argv[1:])
    arguments = _parser().parse_args(argv or ["list"])
    return shown.run_command(lambda: QUEUE_COMMANDS[arguments.command](arguments), arguments.json)


def _parser() -> Arguments:
    description = "Trainings that run one after the other. Page and shell show the same queue."
    parser = Arguments("kohya queue", description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("add", help="check a training and add it: kohya queue add --help", add_help=False)
    about = {
        "list": "show what waits, runs and has run",
        "move": "change the order of those that wait",
        "pause": "start no new training; running ones continue",
        "resume": "continue after a pause, a failure or a restart of the computer",
        "remove": "remove an entry from the queue; restore puts it back",
        "restore": "put a removed entry back, the last one without a name",
        "duplicate": "add a copy of an entry, with a new output name",
    }
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in ("move", "remove", "duplicate"):
            command.add_argument("entry", help="its name or id, or the beginning of its id")
        if name == "restore":
            command.add_argument("entry", nargs="?", default="", help="its name or id")
        if name == "move":
            command.add_argument("to", help="up, down, first, last, or a place: 1 is the next one to start")
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _add(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(ADD_USAGE)
        return EXIT_DONE if argv else EXIT_MISUSED
    own = {flag: flag in argv for flag in ("--json", "--first", "--without-captions")}
    return shown.run_command(lambda: _check_and_add([t for t in argv if t not in own], own), own["--json"])


def _check_and_add(argv: list[str], own: dict[str, bool]) -> None:
    from library.cli.check import read_check_request  # loads more than the other commands need

    _, reading, launch_options = read_check_request(argv)
    added = check_and_add(reading, launch_options, own["--first"], own["--without-captions"])
    if own["--json"]:
        facts = {"id": added.entry.id, "name": added.entry.name, "said": added.said, "hints": added.hints}
        return shown.print_json(facts)
    for hint in added.hints:
        print(f"note: {hint}")
    print(one_line(str(added.said).replace("press Continue in the Runs tab", "kohya queue resume starts it again")))
    return None


def listing() -> dict[str, object]:
    """Return the queue as `kohya queue list --json` prints it, with the names that HTTP has."""
    now = queue.read_queue()
    return {
        "entries": queue_rows(now),
        "waiting": len(now.waiting),
        "paused": now.paused,
        "halted": now.halted,
        "go_on": now.go_on,
        "can_restore": [entry.id for entry in now.removed],
    }


def _list(arguments: argparse.Namespace) -> None:
    if arguments.json:
        return shown.print_json(listing())
    now = queue.read_queue()
    rows = queue_rows(now)
    if not rows:
        print("the queue is empty: kohya queue add RUN.toml adds a training")
        return None
    head = ("", "name", "state", "steps", "time", "starts", "ends", "GPU", "id")
    waiting = [row.id for row in rows if row.waits]
    shown.print_table(head, [_cells(row, waiting) for row in rows])
    for row in (row for row in rows if row.waits and row.differences):
        changes = (
            f"{f'{d.words}:' if d.words else d.option} {d.value or 'default'} instead of {d.before or 'default'}"
            for d in row.differences
        )
        print(one_line(f"{row.name}, unlike {row.compared_with}: {', '.join(changes)}"))
    if now.paused:
        print(f"paused ({now.paused}): kohya queue resume continues it")
    elif now.halted:
        print("halted, as the computer or its process ended: kohya queue resume continues it")
    return None


def _cells(row: QueueRow, waiting: list[str]) -> tuple[str, ...]:
    gpu = ",".join(row.gpus) or shown.UNKNOWN
    place = str(waiting.index(row.id) + 1) if row.waits else ""
    steps = shown.steps(row.step, row.total_steps) if not row.waits else str(row.total_steps or shown.UNKNOWN)
    times = (shown.duration(row.seconds), shown.clock(row.start), shown.clock(row.end))
    return (place, row.name, row.state, steps, *times, gpu, row.id)


def _find_entry(name: str, entries: list[queue.QueueEntry]) -> queue.QueueEntry:
    waiting = [entry for entry in entries if entry.waits and entry.name == name]
    if len(waiting) == 1:  # a name may have run before
        return waiting[0]
    return shown.find_named(name, entries, lambda entry: (entry.id, entry.name), "entry of the queue")


def _move(arguments: argparse.Namespace) -> None:
    entry = _find_entry(arguments.entry, queue.read_queue().entries)
    places = {"first": 0, "last": queue.MAX_WAITING}
    if arguments.to in ("up", "down"):
        queue.move(entry.id, -1 if arguments.to == "up" else 1)
    elif arguments.to in places or (arguments.to.isdecimal() and int(arguments.to[:6])):
        queue.move_to(entry.id, places[arguments.to] if arguments.to in places else int(arguments.to[:6]) - 1)
    else:
        raise ConfigError("to: write up, down, first, last or a number from 1, not {to}", to=arguments.to)
    waiting = queue.read_queue().waiting
    place = next((at for at, each in enumerate(waiting, 1) if each.id == entry.id), 0)
    _say(arguments.json, f"{entry.name} is number {place} of {len(waiting)} waiting")


def _remove(arguments: argparse.Namespace) -> None:
    entry = _find_entry(arguments.entry, queue.read_queue().entries)
    queue.refuse_active(entry)
    queue.remove_entry(entry.id)
    _say(arguments.json, f"{entry.name} is removed: kohya queue restore puts it back", entry.id)


def _restore(arguments: argparse.Namespace) -> None:
    removed = queue.read_queue().removed
    if not removed:
        raise ConfigError("nothing was removed lately")
    entry = _find_entry(arguments.entry, removed) if arguments.entry else removed[-1]
    queue.restore(entry.id)
    _say(arguments.json, f"{entry.name} is back in the queue", entry.id)


def _duplicate(arguments: argparse.Namespace) -> None:
    double = queue.duplicate(_find_entry(arguments.entry, queue.read_queue().entries).id)
    _say(arguments.json, f"{double.name} is in the queue", double.id)


def _pause(arguments: argparse.Namespace) -> None:
    queue.pause()
    _say(arguments.json, "the queue is paused: nothing new is started")


def _resume(arguments: argparse.Namespace) -> None:
    queue.go_on()
    _say(arguments.json, "the queue continues")


def _say(as_json: bool, sentence: str, entry: str = "") -> None:
    if as_json:
        shown.print_json({**listing(), "said": sentence, "entry": entry})
    else:
        print(one_line(sentence))


QUEUE_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "list": _list,
    "move": _move,
    "pause": _pause,
    "resume": _resume,
    "remove": _remove,
    "restore": _restore,
    "duplicate": _duplicate,
}
