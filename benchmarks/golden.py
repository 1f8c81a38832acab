"""Golden runs: the output of tiny trainings, recorded once and compared bit for bit after a code change.

    python -m benchmarks.golden record FOLDER [--tree PATH]    # the inputs, and one JSON file per case
    python -m benchmarks.golden compare FOLDER [--tree PATH]   # run them again; exit with 1 if they differ

Every case trains on a CPU through the scripts in `sd-scripts/`, as a user would, so that one recording serves many
versions of the code: `--tree` names the folder of the version to run (default: the folder of this file). A comparison
runs the recorded options; losses, saved tensors, metadata, states, caches, previews, file names and the run's record
must be equal. Texts (help, logs, the page) may be reworded: their differences are printed but do not fail the
comparison. Bits depend on the processor and the packages, so compare on the machine that recorded.
"""

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.golden_files import LOOSE, Failed, Json, Options, Place, collect_outputs
from benchmarks.online import free_port

PROJECT_ROOT = Path(__file__).resolve().parents[1]
GOLDEN_CASES_FILE = PROJECT_ROOT / "benchmarks" / "golden.toml"
PAGES = "pages"  # the case without training: help, options, check and the page's form
MAX_DIFFERENCES = 12  # differences printed per case
MOMENT = 1_700_000_000  # modification time of the images, which caches record


@dataclass(frozen=True)
class GoldenCase:
    """Trainings of one script, one after another in one folder; no training for the case that only reads."""

    name: str
    script: str
    stages: list[Options]
    quick: bool = False
    launched: bool = False  # by `accelerate launch`


# ---- running a case


def run_case(case: GoldenCase, place: Place) -> dict[str, Json]:
    """Run the stages of a case in turn in one folder; return their output by category."""
    shutil.copytree(place.inputs / "images", place.work / "images")
    for picture in sorted((place.work / "images").rglob("*.*")):
        os.utime(picture, (MOMENT, MOMENT))
    printed = []
    for number, stage in enumerate(case.stages):
        config = place.work / f"stage{number}.toml"
        config.write_text(options_toml(stage, place), encoding="utf-8")
        script = place.tree / "sd-scripts" / f"{case.script}.py"
        launcher = (
            [
                "-m",
                "accelerate.commands.launch",
                "--num_processes",
                "1",
                "--num_machines",
                "1",
                "--cpu",
                "--mixed_precision",
                "no",
                "--dynamo_backend",
                "no",
            ]
            if case.launched
            else []
        )
        printed += place.run([*launcher, script, "--config_file", config]).stdout.splitlines()
    left = collect_outputs(place)
    unhurried = [
        re.sub(r"\b[\d.]+ s(\b|/it.*)", "N s", line)
        for line in printed
        if not re.search(r": \d+ of \d+|^A step took ", line)  # the last lists phases of at least 0.05 s
    ]
    texts = left.setdefault(LOOSE, {})
    assert isinstance(texts, dict)
    # That line lists phases of at least 0.05 s, which depend on the machine's load.
    unhurried = [re.sub(r"(Ready for the first step after N s): .*", r"\1", line) for line in unhurried]
    unhurried = [re.sub(r"samples took \d+%", "samples took N%", line) for line in unhurried]
    texts["console"] = [place.text(line) for line in unhurried]
    return left


def options_toml(options: Options, place: Place) -> str:
    filled = json.dumps(options).replace("{work}", place.work.as_posix()).replace("{inputs}", place.inputs.as_posix())
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in json.loads(filled).items())


# ---- reading without training


def read_pages(case: GoldenCase, place: Place) -> dict[str, Json]:
    """Return help, options, the output of `kohya check --json` and the form of the page."""
    shutil.copytree(place.inputs / "images", place.work / "images")
    options: dict[str, Json] = {}
    texts: dict[str, Json] = {}
    checks: dict[str, Json] = {}
    for stage in case.stages:
        script = str(stage["script"])
        shown = place.run([place.tree / "sd-scripts" / f"{script}.py", "--help"]).stdout
        texts[f"{script} --help"] = [*shown.splitlines()]
        options[f"{script} --help"] = [*sorted(set(re.findall(r"(?m)^  (--[\w-]+)", shown)))]
        good = {name: value for name, value in stage.items() if name != "script"}
        for name, wrong in (("good", {}), ("bad", {"learning_rate": -1, "cache_latents": "so", "no_such_option": 1})):
            config = place.work / f"{script}.toml"
            config.write_text(options_toml({**good, **wrong}, place), encoding="utf-8")
            done = place.run([*place.kohya(), "check", script, "--config_file", config, "--json"], may_fail=True)
            report = json.loads(re.sub(r"[\d.]+ GB free", "N GB free", done.stdout))
            texts[f"{script} check {name}"] = place.steady(report)
            bad = sum(finding["verdict"] == "bad" for finding in report["findings"])
            checks[f"{script} {name}"] = {"code": done.returncode, "mistakes": bad}
    texts["page"], options["page"] = form(place)
    return {"options": options, "checks": checks, LOOSE: texts}


def form(place: Place) -> tuple[Json, Json]:
    """Return the texts of the served page, and the fields of its forms."""
    port = free_port()
    command = [sys.executable, *place.kohya(), "gui", "--no-browser", "--port", str(port)]
    with open(place.work / "page.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, cwd=place.work, env=place.environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=60) as answer:
                    config = json.load(answer)
                break
            except (urllib.error.URLError, ConnectionError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"the page does not start:\n{(place.work / 'page.log').read_text()}") from None
                time.sleep(0.2)
    finally:
        server.terminate()
        server.wait()
    markup = "".join(str(component["props"].get("value") or "") for component in config["components"])
    reader = FormReader()
    reader.feed(markup)
    props = [component["props"] for component in config["components"]]
    labels = [str(each[key]) for each in props for key in ("label", "info", "placeholder") if each.get(key)]
    return [place.text(text) for text in [*labels, *reader.texts]], [place.text(field) for field in reader.fields]


class FormReader(HTMLParser):
    """Collects the fields of a form with their choices, and the visible text, in page order."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("input", "select", "textarea", "form", "option"):
            described = [
                f"{name}={attributes[name]}" for name in ("id", "name", "type", "value") if attributes.get(name)
            ]
            self.fields.append(f"{tag} {' '.join(described)}")
        self.texts += [text for name in ("title", "placeholder", "aria-label") if (text := attributes.get(name))]

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


# ---- recording and comparing


def golden_cases() -> list[GoldenCase]:
    """Return the cases of golden.toml, and the one that reads help and pages with the default options of every
    script."""
    tables = tomllib.loads(GOLDEN_CASES_FILE.read_text(encoding="utf-8"))

    def whole(script: str, stage: Options) -> Options:
        family = script.partition("_train")[0]
        return {**tables["all"], **tables["family"][family], **tables["script"].get(script, {}), **stage}

    cases = [
        GoldenCase(name, **case | {"stages": [whole(case["script"], stage) for stage in case["stages"]]})
        for name, case in tables["case"].items()
    ]
    for family in tables["each"]["families"]:
        for kind, suffix in (("lora", "_train_network"), ("full", "_train")):
            stages = [whole(family + suffix, tables["each"][kind])]
            cases.append(GoldenCase(f"{family}_{kind}", family + suffix, stages))
    scripts = dict.fromkeys(case.script for case in cases)
    return [*cases, GoldenCase(PAGES, "", [whole(script, {"script": script}) for script in scripts])]


def make_inputs(folder: Path) -> None:
    """Make tiny models, images and prompts once, as a comparison must not depend on the code that makes them."""
    from library.demo import files
    from library.families import FAMILIES

    unfinished = folder.with_name("inputs-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    demo = files.prepare_demo(unfinished / "demo", FAMILIES)
    shutil.move(demo.folder / "models", unfinished / "models")
    shutil.move(demo.images, unfinished / "images")
    shutil.copytree(unfinished / "images" / "2_plix house", unfinished / "regularisation" / "1_house")
    prompts = "a cat --w 64 --h 64 --s 2 --d 1\na house --w 64 --h 128 --s 2 --d 2 --l 3 --n blurry\n"
    (unfinished / "prompts.txt").write_text(prompts, encoding="utf-8")
    shutil.rmtree(unfinished / "demo")
    unfinished.rename(folder)


def run_case_in_folder(case: GoldenCase, tree: Path, folder: Path, keep: bool) -> dict[str, Json]:
    """Run a case in its own folder, which is deleted unless `keep` is set."""
    work = Path(tempfile.mkdtemp(prefix=f"golden-{case.name}-")).resolve()
    try:
        place = Place(tree, folder / "inputs", work, folder / "compiled")
        return (run_case if case.script else read_pages)(case, place)
    finally:
        if keep:
            print(f"{case.name}: kept {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def compare_values(before: Json, after: Json, where: str = "") -> Iterator[str]:
    """Yield a line for every value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            name = f"{where}: {key}" if where else key
            if key not in after or key not in before:
                yield f"{name}: {'new' if key in after else 'missing'}"
            else:
                yield from compare_values(before[key], after[key], name)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (first, other) in enumerate(zip(before, after, strict=True)):
            yield from compare_values(first, other, f"{where} [{number}]")
    elif isinstance(before, list) and isinstance(after, list):
        for line in difflib.unified_diff([*map(json.dumps, before)], [*map(json.dumps, after)], n=0, lineterm=""):
            if not line.startswith(("---", "+++", "@@")):
                yield f"{where}: {line}"
    elif before != after or type(before) is not type(after):
        yield f"{where}: {json.dumps(before)} -> {json.dumps(after)}"


def record_case(case: GoldenCase, tree: Path, folder: Path, keep: bool) -> bool:
    """Run a case and store its output."""
    started = time.monotonic()
    left = {"case": asdict(case), "result": run_case_in_folder(case, tree, folder, keep)}
    (folder / f"{case.name}.json").write_text(json.dumps(left, indent=1) + "\n", encoding="utf-8")
    print(f"{case.name}: recorded in {time.monotonic() - started:.0f} s", flush=True)
    return True


def compare_case(case: GoldenCase, tree: Path, folder: Path, keep: bool) -> bool:
    """Run a recorded case again and print its differences; return whether all values but texts are equal."""
    started = time.monotonic()
    before = json.loads((folder / f"{case.name}.json").read_text(encoding="utf-8"))["result"]
    after = run_case_in_folder(case, tree, folder, keep)
    texts = list(compare_values(before.pop(LOOSE), after.pop(LOOSE)))
    wrong = list(compare_values(before, after))
    lines = [f"{case.name}: {'differs' if wrong else 'equal'} ({time.monotonic() - started:.0f} s)"]
    for changes, title in ((wrong, "  "), (texts, "  text differs: ")):
        lines += [f"{title}{line[:300]}" for line in changes[:MAX_DIFFERENCES]]
        lines += [f"{title}... and {len(changes) - MAX_DIFFERENCES} more"] if len(changes) > MAX_DIFFERENCES else []
    print("\n".join(lines), flush=True)
    return not wrong


def succeeded(name: str, future: "Future[bool]") -> bool:
    """Wait for a case; a failure counts as a difference and does not stop the others."""
    try:
        return future.result()
    except Failed as error:
        print(f"{name}: {error}", flush=True)
        return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folder", type=Path, help="the recording")
    parser.add_argument("--tree", type=Path, default=PROJECT_ROOT, help="folder of the code version to run")
    parser.add_argument("--quick", action="store_true", help="a few cases, in less than a minute")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="number of cases that run in parallel")
    parser.add_argument("--keep", action="store_true", help="keep the working folders of the cases")
    args = parser.parse_args(argv)
    folder, tree = args.folder.resolve(), args.tree.resolve()
    if args.what == "record":
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "inputs").exists():
            make_inputs(folder / "inputs")
        cases = golden_cases()
    else:
        stored = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
        cases = [GoldenCase(**result["case"]) for result in stored]
    if unknown := set(args.case) - {case.name for case in cases} or (not cases and {str(folder)}):
        parser.error(f"unknown case, or not recorded: {', '.join(sorted(unknown))}")
    chosen = [case for case in cases if (case.quick or not args.quick) and (case.name in args.case or not args.case)]
    work = record_case if args.what == "record" else compare_case
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {case.name: pool.submit(work, case, tree, folder, args.keep) for case in chosen}
        good = [succeeded(name, future) for name, future in waiting.items()]
    print(f"{sum(good)} of {len(good)} cases {'recorded' if args.what == 'record' else 'equal'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
