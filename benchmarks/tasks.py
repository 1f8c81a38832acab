"""Ten daily tasks in this page, in headless Chromium: clicks, fields and seconds.

    python -m benchmarks.tasks [--repeats 3] [--only NAME] [--markdown FILE] [--json FILE]

Hands that need no time do them, by the shortest way that somebody who knows the page takes, so the seconds are the
page's own, with the whole check before a training. Trainings are stand-ins. Seconds are the median of the repeats.
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

from benchmarks import tasks_ours
from benchmarks.online import page_online
from benchmarks.screenshots import CHROMIUM, PROJECT_ROOT, WINDOW_SIZES
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
class TaskResult:
    """How a task is done: clicks and fields of one time, seconds of each."""

    name: str
    clicks: int = 0
    fields: int = 0
    seconds: list[float] = field(default_factory=list)


# ---- the table


def result_row(result: TaskResult) -> str:
    spread = f" ({min(result.seconds):.1f}-{max(result.seconds):.1f})" if len(result.seconds) > 1 else ""
    seconds = f"{statistics.median(result.seconds):.1f}{spread}"
    return f"| {TASK_TITLES[result.name]} | {result.clicks} | {result.fields} | {seconds} |"


def result_table(results: list[TaskResult]) -> list[str]:
    return ["| task | clicks | fields | seconds |", "|---|---|---|---|", *map(result_row, results)]


# ---- measuring


def prepare_ground(folder: Path) -> Ground:
    """The files of the tasks: a small model of the demo, and its pictures."""
    from library.demo.files import prepare_demo

    demo = prepare_demo(folder / "demo", ("sdxl",))
    return Ground(folder, demo.models["sdxl"]["sdxl"], sorted(demo.images.rglob("*.png")))


def do_task(browser: Any, address: str, task: Callable[[Hands], None], result: TaskResult) -> None:
    """Do a task once on a page that is opened for it."""
    width, height = WINDOW_SIZES["desk"]
    context = browser.new_context(viewport={"width": width, "height": height})
    try:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(address)
        page.wait_for_function(FORM_READY)
        page.wait_for_timeout(1500)  # the page builds in idle moments what is clicked later
        hands = Hands(page)
        task(hands)
        result.seconds.append(time.perf_counter() - hands.began)
        result.clicks, result.fields = hands.clicks, hands.fields
    finally:
        context.close()


def measure_task(name: str, repeats: int, browser: Any, address: str, at: Ground) -> TaskResult:
    result = TaskResult(name)
    task = tasks_ours.TASKS[name]
    for repeat in range(repeats):
        ground = Ground(at.folder / f"{name}-{repeat}", at.model, at.pictures)
        ground.folder.mkdir()
        shutil.rmtree(at.folder / "kohya" / "output", ignore_errors=True)  # else the check asks for another name
        if name == "results":
            tasks_ours.finished_run(ground)
        do_task(browser, address, lambda hands, ground=ground: task(hands, ground), result)
        tasks_ours.stop_all()
    return result


def measure_tasks(only: list[str], repeats: int, folder: Path) -> list[TaskResult]:
    from playwright.sync_api import sync_playwright

    from library.runs import queue, start

    start.starting = tasks_ours.stand_in
    queue.pause()  # its process would start real trainings
    ground = prepare_ground(folder)
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    rows = []
    with ExitStack() as stack:
        address = stack.enter_context(page_online(folder))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_FLAGS)
        for name in only or TASK_TITLES:
            rows.append(measure_task(name, repeats, browser, address, ground))
            print(result_row(rows[-1]), flush=True)
        browser.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the clicks, fields and seconds of ten daily tasks.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=list(TASK_TITLES), action="append", default=[])
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    with tempfile.TemporaryDirectory(prefix="tasks-") as made:
        folder = Path(made).resolve()
        os.environ["KOHYA_HOME"] = str(folder / "home")
        rows = measure_tasks(asked.only, asked.repeats, folder)
    if asked.markdown:
        asked.markdown.write_text("\n".join(result_table(rows)) + "\n", encoding="utf-8")
    if asked.json:
        commit = ["git", "-C", str(PROJECT_ROOT), "log", "-1", "--format=%h of %cs"]
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "ours": subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip(),
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
