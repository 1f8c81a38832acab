"""Ten daily tasks in headless Chromium, in this page and beside it in that of kohya_ss: clicks, fields and seconds.

    python -m benchmarks.tasks [--rival CHECKOUT:PYTHON] [--repeats 3] [--only NAME] [--markdown FILE] [--json FILE]

Hands that need no time do them, by the shortest way that somebody who knows the page takes, so the seconds are the
page's own; here they include the whole check before a training. Trainings are stand-ins on both sides. Seconds are
the median of the repeats, which alternate between the two pages.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import tasks_ours, tasks_rival
from benchmarks.screenshots import CHROMIUM, PROJECT_ROOT, WINDOW_SIZES, online
from benchmarks.tasks_hands import Ground, Hands

TIMEOUT_MS = 90_000  # the check before a training loads torch
FORM_READY = "document.querySelector('form.settings')"
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
TASK_TITLES = {
    "first": "Train a first LoRA from a folder of images and a model",
    "import": "Load a JSON config of kohya_ss and train it",
    "preset": "Choose another preset, and see what it changes",
    "find": "Find the setting for “noise offset”, knowing only these words",
    "mend": "Mend a wrong path and a number out of range, then start",
    "print": "Load a config and print its command",
    "queue": "Queue three ranks of a loaded config",
    "resume": "Stop a run and resume it",
    "caption": "Open a folder of images and mend a caption",
    "results": "See samples and loss of a finished run",
}


@dataclass
class Side:
    """How a page does a task: counts of one time, seconds of each; `instead` says that it cannot."""

    clicks: int = 0
    fields: int = 0
    seconds: list[float] = field(default_factory=list)
    instead: str = ""

    @property
    def typical(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class TaskResult:
    name: str
    ours: Side = field(default_factory=Side)
    theirs: Side | None = None


# ---- the table


def result_cells(side: Side | None) -> list[str]:
    if side is None:
        return ["", "", ""]
    if side.instead:
        return ["not possible", "", ""]
    if not side.seconds:  # counted only, or not at all
        return [str(side.clicks), str(side.fields), "-"] if side.clicks or side.fields else ["not measured", "", ""]
    spread = f" ({min(side.seconds):.1f}-{max(side.seconds):.1f})" if len(side.seconds) > 1 else ""
    return [str(side.clicks), str(side.fields), f"{side.typical:.1f}{spread}"]


def result_table(rows: list[TaskResult]) -> list[str]:
    """The lines of the table, with what is not possible in words below it."""
    lines = [
        "| task | clicks | fields | seconds | kohya_ss: clicks | fields | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join([TASK_TITLES[row.name], *result_cells(row.ours), *result_cells(row.theirs)])} |" for row in rows
    ]
    beside = [row for row in rows if row.theirs]
    remarks = {row.name: row.theirs.instead or tasks_rival.REMARKS.get(row.name, "") for row in beside if row.theirs}
    return [*lines, "", *(f"- {TASK_TITLES[name]}: {words}." for name, words in remarks.items() if words)]


def not_fewer(rows: list[TaskResult]) -> list[str]:
    """Where this page takes as much as the other, or more."""
    found = []
    for row in rows:
        theirs = row.theirs
        if theirs is None or theirs.instead or not (theirs.seconds and row.ours.seconds):
            continue
        for name, own, other in (
            ("clicks", row.ours.clicks, theirs.clicks),
            ("fields", row.ours.fields, theirs.fields),
            ("seconds", row.ours.typical, theirs.typical),
        ):
            if own >= other > 0 or own > other:
                found.append(f"{row.name}: {name} ({own:.3g} and {other:.3g})")
    return found


# ---- measuring


def prepare_ground(folder: Path) -> Ground:
    """The files of the tasks: a small model of the demo, and its pictures."""
    from library.demo.files import prepare_demo

    demo = prepare_demo(folder / "demo", ("sdxl",))
    return Ground(folder, demo.models["sdxl"]["sdxl"], sorted(demo.images.rglob("*.png")))


def do_task(browser: Any, address: str, ready: str, task: Callable[[Hands], None], side: Side) -> None:
    """Do a task once on a page that is opened for it."""
    width, height = WINDOW_SIZES["desk"]
    context = browser.new_context(viewport={"width": width, "height": height})
    try:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(address)
        page.wait_for_function(ready)
        page.wait_for_timeout(1500)  # the page builds in idle moments what is clicked later
        hands = Hands(page)
        task(hands)
        side.seconds.append(time.perf_counter() - hands.began)
        side.clicks, side.fields = hands.clicks, hands.fields
    finally:
        context.close()


def measure_task(
    name: str, repeats: int, browser: Any, ours: str, rival: tasks_rival.Rival | None, at: Ground
) -> TaskResult:
    row = TaskResult(name)
    own, theirs = tasks_ours.TASKS[name], tasks_rival.TASKS[name]
    row.theirs = Side(instead=theirs if isinstance(theirs, str) else "") if rival else None
    for repeat in range(repeats):
        ground = Ground(at.folder / f"{name}-{repeat}", at.model, at.pictures)
        ground.folder.mkdir()
        shutil.rmtree(at.folder / "kohya" / "output", ignore_errors=True)  # else the check asks for another name
        if name == "results":
            tasks_ours.finished_run(ground)
        do_task(browser, ours, FORM_READY, lambda hands, ground=ground: own(hands, ground), row.ours)
        tasks_ours.stop_all()
        if rival and row.theirs and not isinstance(theirs, str):
            rival.forget()
            do_task(browser, rival.address, tasks_rival.PAGE_READY, lambda h, g=ground: theirs(h, g, rival), row.theirs)
            tasks_rival.stop_rival(browser, rival)
    return row


def measure_tasks(only: list[str], repeats: int, folder: Path, rival: tuple[Path, Path] | None) -> list[TaskResult]:
    from playwright.sync_api import sync_playwright

    from library.runs import queue, start

    start.starting = tasks_ours.stand_in
    queue.pause()  # its process would start real trainings
    ground = prepare_ground(folder)
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    rows = []
    with ExitStack() as stack:
        address = stack.enter_context(online(folder))
        server = stack.enter_context(tasks_rival.rival_server(*rival, folder)) if rival else None
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_FLAGS)
        for name in only or TASK_TITLES:
            rows.append(measure_task(name, repeats, browser, address, server, ground))
            print(result_table(rows[-1:])[2], flush=True)
        browser.close()
    return rows


def commit_of(folder: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the clicks, fields and seconds of ten daily tasks.")
    parser.add_argument("--rival", help="a checkout of kohya_ss and its Python, as PATH:PYTHON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=list(TASK_TITLES), action="append", default=[])
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    asked = parser.parse_args()
    rival = None
    if asked.rival:
        checkout, _, python = asked.rival.rpartition(":")
        rival = Path(checkout).resolve(), Path(python).absolute()
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    with tempfile.TemporaryDirectory(prefix="tasks-") as made:
        folder = Path(made).resolve()
        os.environ["KOHYA_HOME"] = str(folder / "home")
        rows = measure_tasks(asked.only, asked.repeats, folder, rival)
    lines = result_table(rows) + ["", f"Not fewer here: {'; '.join(not_fewer(rows)) or 'nothing'}."]
    print("\n".join(lines))
    if asked.markdown:
        asked.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if asked.json:
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "ours": commit_of(PROJECT_ROOT),
            "kohya_ss": commit_of(rival[0]) if rival else "",
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_before": load_before,
            "repeats": asked.repeats,
            "tasks": [asdict(row) for row in rows],
        }
        asked.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
