"""`kohya runs`: list trainings, follow them, stop, resume, compare and remove them."""

import argparse
import dataclasses
import time
from collections.abc import Callable

from library.cli import shown
from library.cli.main import EXIT_FAILED
from library.config.arguments import Arguments
from library.config.json_types import JsonObject
from library.config.problems import MessageLike, one_line, printable_text
from library.runs import deleting, explain, layout, overview, queue, queue_rows, reader, stop
from library.trainings import comparing
from library.trainings.reopening import resume_run

ABOUT = {
    "list": "show all runs, the newest first",
    "show": "show one run: its state, numbers and files",
    "stop": "stop a run after its current step, saving a state to resume from",
    "save": "have a run save a file and a state after its current step",
    "sample": "have a run generate its sample images after its current step",
    "resume": "resume a run that has ended early: now, or first in the queue",
    "compare": "show the settings that differ between runs, and the results",
    "rm": "delete the record of a run; with --files also what it has written",
}


def main(argv: list[str]) -> int:
    """Run a command about runs. Return 0 on success, 1 on failure, 2 on wrong usage."""
    is_listing = not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help"))
    arguments = _parser().parse_args(["list", *argv] if is_listing else argv)
    return shown.run_command(lambda: RUN_COMMANDS[arguments.command](arguments), arguments.json)


def _parser() -> Arguments:
    description = "Trainings that run or have run, started by page, shell or queue. Without a command: list."
    parser = Arguments("kohya runs", description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in ABOUT.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in ("compare", "rm"):
            command.add_argument("runs", nargs="+", metavar="run", help="output name, id, or the beginning of the id")
        elif name != "list":
            about = "output name (its newest run), id, or the beginning of the id"
            if name == "resume":
                command.add_argument("run", help=about)
            else:
                command.add_argument("run", nargs="?", default="", help=f"{about}; without it, the active run")
        if name == "list":
            command.add_argument("--state", choices=[*layout.ACTIVE, *layout.FINAL], help="only those in this state")
            command.add_argument("--limit", type=int, default=30, help="show at most this many")
        if name == "stop":
            how = command.add_mutually_exclusive_group()
            how.add_argument("--now", action="store_true", help="end the step early")
            how.add_argument("--kill", action="store_true", help="end a run that hangs; unsaved work is lost")
            command.add_argument("--pause-queue", action="store_true", help="start nothing else afterwards")
        if name == "rm":
            command.add_argument("--files", action="store_true", help="also models, states and samples that it wrote")
        if name in ("stop", "rm"):
            command.add_argument("--yes", action="store_true", help="do not ask")
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _list(arguments: argparse.Namespace) -> None:
    summaries = [run for run in overview.overview() if arguments.state in (None, run.state)][: max(0, arguments.limit)]
    if arguments.json:
        return shown.print_json({"runs": summaries})
    if not summaries:
        print("there are no runs" if arguments.state is None else f"no run is {arguments.state}")
        return None
    shown.print_table(RUN_COLUMNS, [_cells(run) for run in summaries])
    return None


RUN_COLUMNS = ("name", "kind", "state", "steps", "loss", "speed", "left", "started", "id")


def _cells(run: overview.RunSummary) -> tuple[str, ...]:
    loss = shown.UNKNOWN if run.loss is None else f"{run.loss:.4f}"
    speed = shown.UNKNOWN if run.speed is None else f"{run.speed:.3g} s"
    left = shown.duration(run.time_left(time.time()))
    steps = shown.steps(run.steps_done, run.steps_total)
    return (run.name, run.title, run.state, steps, loss, speed, left, shown.clock(run.started), run.id)


def _show(arguments: argparse.Namespace) -> None:
    run = shown.find_run_named(arguments.run) if arguments.run else _active_or_newest()
    events = reader.progress(run.folder).update().events.get("saved", ())
    summary, files = overview.summary(run), [str(path) for path in reader.saved_files(run, events)]
    if arguments.json:
        facts = {**dataclasses.asdict(summary), "saved": files, "settings": queue_rows.run_values(run)}
        return shown.print_json(facts)
    error: MessageLike = explain.cause(str(summary.error)) or summary.error
    taken = overview.seconds_taken(summary)
    lines = {
        "state": summary.state,
        "error": error,
        "steps": shown.steps(summary.steps_done, summary.steps_total),
        "loss": "" if summary.loss is None else f"{summary.loss:.4f}",
        "held-out loss": "" if summary.held_out_loss is None else f"{summary.held_out_loss:.4f}",
        "speed": "" if summary.speed is None else f"{summary.speed:.3g} s/step",
        "left": shown.duration(summary.time_left(time.time())),
        "took" if not summary.active else "running for": shown.duration(taken),
        "started": shown.clock(summary.started),
        "GPU": ", ".join(summary.devices),
        "note": summary.note,
        "record": summary.folder,
        "log": str(run.folder / layout.LOG),
        "saved": ", ".join(files),
    }
    print(one_line(f"{summary.name}: {summary.title} ({run.id})"))
    for name, value in lines.items():
        if str(value) not in ("", shown.UNKNOWN):
            print(printable_text(f"  {name}: {value}"))
    return None


def _active_or_newest() -> reader.RecordedRun:
    runs = reader.runs()
    newest = next((run for run in runs if run.active), runs[0] if runs else None)
    return newest or shown.only_active_run("")


def _stop(arguments: argparse.Namespace) -> int | None:
    run = shown.only_active_run(arguments.run)
    how = "kill" if arguments.kill else "now" if arguments.now else "after_step"
    if not run.active:
        return _say(arguments, f"{run.id} has ended already: it is {run.state}", run.id)
    if how == "kill":
        stop.refuse_early_kill(run)
    question = stop.question_before(run, how)
    if question and not shown.confirm(question, arguments.yes):
        return EXIT_FAILED
    following = queue.starts_next(run)
    if arguments.pause_queue:
        queue.pause()
    stop.request(run.id, how)
    then = f" Then the queue starts {following.name}; kohya queue pause keeps it." if following else ""
    then = " The queue is paused." if arguments.pause_queue else then
    return _say(arguments, f"{run.id}: {stop.answer_to(run, how)}{then}", run.id)


def _request(arguments: argparse.Namespace) -> None:
    run = shown.only_active_run(arguments.run)
    stop.refuse_ended(run)
    stop.request_output(run.id, arguments.command)
    _say(arguments, f"{run.id}: {stop.answer_to(run, arguments.command)}", run.id)


def _resume(arguments: argparse.Namespace) -> None:
    resumed = resume_run(shown.find_run_named(arguments.run))
    sentence = str(resumed.said).replace(" (see the Runs tab)", ": kohya queue list shows it")
    if arguments.json:
        return shown.print_json({"said": sentence, "run": resumed.run, "entry": resumed.entry})
    print(f"{resumed.run}: {sentence}" if resumed.run else sentence)
    return None


def _compare(arguments: argparse.Namespace) -> None:
    comparison = comparing.compare_runs([shown.find_run_named(name) for name in arguments.runs])
    if arguments.json:
        return shown.print_json(comparison)
    shown.print_table(RUN_COLUMNS, [_cells(run) for run in comparison.runs])
    if not comparison.options:
        print("no setting differs")
        return None
    print()
    rows = [(row.words or row.option, *(value or "default" for value in row.values)) for row in comparison.options]
    shown.print_table(("", *(run.name for run in comparison.runs)), rows)
    return None


def _remove(arguments: argparse.Namespace) -> int | None:
    deletions = [deleting.plan_deletion(shown.find_run_named(name), arguments.files) for name in arguments.runs]
    if not arguments.json:
        for deletion in deletions:
            print(deletion.sentence())
            for path in deletion.files:
                print(one_line(f"  {path}"))
    question = "Delete it?" if len(deletions) == 1 else f"Delete these {len(deletions)}?"
    if arguments.json:
        question = " ".join([*(str(deletion.sentence()) for deletion in deletions), question])
    if not shown.confirm(question, arguments.yes):
        return EXIT_FAILED
    for deletion in deletions:
        deleting.delete_run(deletion)
    facts: JsonObject = {
        "removed": [deletion.run.id for deletion in deletions],
        "files": [str(path) for deletion in deletions for path in deletion.files],
        "kept": [str(path) for deletion in deletions for path in deletion.kept],
    }
    if arguments.json:
        return shown.print_json(facts)
    print(f"{', '.join(facts['removed'])}: deleted")
    return None


def _say(arguments: argparse.Namespace, sentence: str, run: str) -> None:
    if arguments.json:
        shown.print_json({"said": sentence, "run": run})
    else:
        print(sentence)


RUN_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "list": _list,
    "show": _show,
    "stop": _stop,
    "save": _request,
    "sample": _request,
    "resume": _resume,
    "compare": _compare,
    "rm": _remove,
}
