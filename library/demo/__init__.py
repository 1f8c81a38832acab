"""`kohya demo`: train a LoRA on this machine within minutes, with files in the real formats.

It draws a dozen pictures of a character that no model has seen, and writes a ready TOML for each script; trains a LoRA
of a small model as any headless training is started, and shows in one picture what it has learned. On a GPU it trains
compiled, and compares with a short eager training. Families without a small trained model get a tiny random one, whose
pictures would be noise: of these it shows how they train, and no picture.
"""

import argparse
import sys
from pathlib import Path

from library import families
from library.config.arguments import Arguments
from library.config.building import build_config
from library.config.command import quote_command
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.demo import summary, zorb
from library.demo.configs import toml_name
from library.demo.files import Demo, prepare_demo
from library.demo.small_model import small_model_of
from library.jobs.work import join_work
from library.runs import foreground, gpu_slots, reader
from library.runs.launcher import launch_command
from library.setup.installation import SETUP

INTERRUPTED = 130  # how a training ends that Ctrl+C stopped before its first step
COMPARED_STEPS = 40  # of the eager training that a compiled one of a small model is compared with
DEMO_VARIANTS = tuple(name for family in families.all_families() for name in family.demo_variants)


# Why: docs/decisions/2026-11-20-demo-is-a-package.md
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 0, or raises ConfigError."""
    arguments = _build_demo_parser().parse_args(argv)
    choice = arguments.family
    models = families.FAMILIES if choice == "all" else (choice,)
    # A CPU takes minutes to compile, and gains little.
    compiled = gpu_slots.has_gpu() if arguments.compile is None else arguments.compile
    trained = [name for name in models if small_model_of(name)]
    with join_work("demo") as work:
        demo = prepare_demo(Path(arguments.out).absolute(), models, compiled, trained)
        work.store({"configs": {name: str(path) for name, path in demo.configs.items()}})
    if arguments.no_train:
        print(f"Ready in {demo.folder}: {', '.join(path.name for path in demo.configs.values())}")
        return 0
    pictures, lines = [], []
    if trained:
        print("\n".join(["", *demo_opening_lines(demo, compiled)]), flush=True)
    for model in models:
        run, text = train_and_compare(demo, model, arguments.steps, compiled, model in trained)
        pictures += summary.write_picture(run) if model in trained else []
        lines.append(text)
    print("\n".join(["", *pictures, "", *lines, *demo_closing_lines(demo, models[0])]))
    return 0


def _build_demo_parser() -> argparse.ArgumentParser:
    parser = Arguments("kohya demo", description="Train a LoRA of a small model on images that the demo draws.")
    names, default = (*families.FAMILIES, *DEMO_VARIANTS, "all"), families.SHOWN_BY_DEMO
    # Variants share their family's graphs, so compiling them, too, would double the time and show nothing new.
    help_text = f"which model; all: one of each family, without its relatives (default: {default})"
    parser.add_argument("--family", choices=names, default=default, help=help_text)
    parser.add_argument("--out", default="demo", metavar="DIR", help="the folder for all files (default: demo)")
    parser.add_argument("--steps", type=int, metavar="N", help="number of training steps, instead of the TOML's")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="train once more, with torch.compile (default: on a GPU)",
    )
    parser.add_argument("--no-train", action="store_true", help="write the files and do not train")
    return parser


def train_and_compare(demo: Demo, model: str, steps: int | None, compiled: bool, learns: bool) -> tuple[Path, str]:
    """Train a LoRA, and if `compiled` also eagerly, from the same seed. Return its run's folder and a summary of both.

    If the model `learns`, as it is a trained one, the eager training beside a compiled one is short.
    """
    script = families.lora_script(families.owner(model))
    toml = demo.configs[toml_name(script, model)]
    config = build_config(families.config_class(script), read_toml(toml))
    name, runs = config.save.output_name or "", {}
    sample_options = ["--sample_every_n_steps", str(max(1, steps // 2))] if learns and steps else []
    if learns and not compiled:
        runs["eager"] = train_headless(toml, script, config, name, ["--no-compile", *sample_options], steps)
    else:
        compared_steps = min(steps or COMPARED_STEPS, COMPARED_STEPS) if learns else steps
        silent = ["--no-sample_images"] if learns else []
        runs["eager"] = train_headless(toml, script, config, f"{name}-eager", ["--no-compile", *silent], compared_steps)
    if compiled:
        # A machine without a C++ compiler still gets its LoRA; the summary says why it was not compiled.
        runs["compiled"] = train_headless(
            toml, script, config, name, ["--compile", "--compile_fallback", *sample_options], steps
        )
    outcomes = {kind: summary.read_outcome(folder) for kind, folder in runs.items()}
    return runs.get("compiled", runs["eager"]), summary.summary_text(model, outcomes, config, learns)


def train_headless(toml: Path, script: str, config: RunConfig, name: str, flags: list[str], steps: int | None) -> Path:
    """Start one headless training and wait for it; return its run's folder. Raises ConfigError on failure."""
    output = Path(config.save.output_dir or "")
    name = free_demo_name(output, name)
    flags = ["--output_name", name, *flags, *(["--max_train_steps", str(steps)] if steps else [])]
    print(f"\n> {quote_command(['kohya', 'train', script, '--config_file', str(toml), *flags])}\n", flush=True)
    arguments, variables = launch_command(toml, script)
    code = foreground.run_in_foreground([*arguments, *flags], variables)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    run_folders = sorted((output / "runs").glob(f"{name}-*"), key=lambda folder: folder.stat().st_mtime)
    if code:
        log = f"; its log: {run_folders[-1] / 'log.txt'}" if run_folders else ""
        raise ConfigError(
            "the demo's training ended with an error (exit code {exit_code}){log}", exit_code=code, log=log
        )
    if not run_folders:
        raise ConfigError("the demo's training left no record in {folder}", folder=output / "runs")
    if reader.run_at(run_folders[-1]).state == "stopped":
        raise KeyboardInterrupt
    return run_folders[-1]


def free_demo_name(output: Path, name: str) -> str:
    """Return `name`, or `name-2` and so on: the first that no earlier demo has used, so that nothing is overwritten."""
    number, candidate = 1, name
    while any(output.glob(f"{candidate}.*")) or any((output / "runs").glob(f"{candidate}-[0-9]*-*")):
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def demo_opening_lines(demo: Demo, compiled: bool) -> list[str]:
    """Return the lines before the first training: what is learned from which images, how long it takes, what to see."""
    until = "a few minutes" if compiled else "about two minutes on two cores of a CPU"
    return [
        f"A small model learns the {zorb.NAME}, a character that it has never seen, from these images:",
        f"  {demo.folder / zorb.NAME}",
        f"It takes {until}. Meanwhile images of the model appear here, first without what it learns:",
        f"  {demo.folder / 'output' / 'sample'}",
    ]


def demo_closing_lines(demo: Demo, model: str) -> list[str]:
    """Return the last lines: where the files are, and what to do next."""
    kohya = Path(sys.executable).with_name("kohya")
    script = families.lora_script(families.owner(model))
    toml = demo.configs[toml_name(script, model)]
    config = build_config(families.config_class(script), read_toml(toml))
    name = free_demo_name(demo.folder / "output", config.save.output_name or "")  # a training overwrites no file
    command = [str(kohya), "train", script, "--config_file", str(toml), "--output_name", name]
    pictures = [f"  images    {demo.folder / zorb.NAME}"] if (demo.folder / zorb.NAME).exists() else []
    return [
        f"Everything is in {demo.folder}",
        *pictures,
        f"  configs   {', '.join(path.name for path in demo.configs.values())}",
        f"  results   {demo.folder / 'output'}",
        f"Next: open the page ({SETUP} gui): Runs has this training, and Try it generates more images with the LoRA.",
        "Or change a TOML, and train again:",
        f"  {quote_command(command)}",
    ]
