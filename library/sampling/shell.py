"""`kohya sample`: pictures of a base model with LoRA files, side by side, on a GPU that no training uses."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from library import families
from library.config.arguments import Arguments
from library.config.building import build
from library.config.formats import read_toml
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, MessageLike
from library.config.run_config import RunConfig
from library.families.recognition import recognised
from library.jobs.work import joined
from library.runs import gpu_slots
from library.runs.gpu_wait import free_devices
from library.sampling import plan, prompt_checks
from library.sampling import prompts as prompt_files
from library.sampling.prompts import Prompt

if TYPE_CHECKING:
    from library.sampling.generate import Sheet

DONE = 0
BASE = "pretrained_model_name_or_path"


def main(argv: list[str], script_of: Callable[[Path], str]) -> int:
    """Generate; 0 when it worked. `script_of` says which script a TOML is for. Raises ConfigError."""
    asked = parser().parse_args(argv)
    loras = [weighted(text) for text in asked.lora]
    strengths = numbers(asked.strengths)
    columns = plan.columns(asked.compare, loras, strengths)
    prompts = prompts_of(asked)
    plan.check_size(len(columns), prompts)
    config = config_of(asked.config, dict(pair(text) for text in asked.set), script_of)
    word = asked.word or word_of(asked.config)
    with joined("sample") as work, free_devices({"cpu": asked.cpu}, work.wait) as own:
        os.environ.update(gpu_slots.environment(own))
        generate = families.load("library.sampling.generate:generate")  # with torch, which looks for GPUs only once

        def store(sheet: "Sheet") -> None:
            work.store(sheet.as_json())
            if not work.folder:
                print(next(name for row in reversed(sheet.files) for name in reversed(row) if name), flush=True)

        for note in notes(asked, config):
            print(f"note: {note}", file=sys.stderr)
        sheet = generate(config, columns, prompts, asked.out, work.phase, store, word)
        print(sheet.grid)
    return DONE


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = Arguments(
        "kohya sample",
        description="Generate images with a base model and LoRA, embedding or LLLite files, side by side. Waits while "
        "a training uses the GPU.",
    )
    made.add_argument("config", type=Path, help="the TOML of a training, or a base model (.safetensors or diffusers)")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the model, such as t5xxl=FILE; may be given several times",
    )
    made.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[=STRENGTH]",
        help="a LoRA, LyCORIS, embedding or LLLite file; may be given several times",
    )
    made.add_argument(
        "--word", default="", help="the word of embeddings, if neither they nor the TOML say it; else their name"
    )
    made.add_argument(
        "--compare",
        choices=plan.COMPARE,
        default="together",
        help="together, at several strengths, or each file by itself as for epochs",
    )
    made.add_argument(
        "--strengths",
        default=", ".join(f"{one:g}" for one in plan.STRENGTHS),
        help="factors of the files' strengths for --compare strengths",
    )
    made.add_argument("--prompt", action="append", default=[], help="what to generate, as a line of a prompt file")
    made.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt file")
    made.add_argument("--seed", type=int, help="for prompts that have none; else a random one, the same for all")
    made.add_argument("--out", type=Path, default=Path("generated"), metavar="FOLDER", help="where images are kept")
    made.add_argument("--cpu", action="store_true", help="generate on the processor")
    return made


def weighted(text: str) -> tuple[Path, float]:
    """FILE=0.8 -> the file and its strength; without one it is 1. A name may have a = in it."""
    path, found, number = text.rpartition("=")
    if not found or Path(text).is_file():
        path, number = text, "1"
    try:
        return Path(path), float(number)
    except ValueError:
        raise ConfigError("{text}: the strength is no number, write FILE=0.8", text=text) from None


def word_of(config: Path) -> str:
    """The word that the training of a TOML teaches, "" where it teaches none."""
    return str(read_toml(config).get("token_string") or "") if config.suffix.lower() == ".toml" else ""


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError("strengths are numbers with commas between, such as 0, 0.5, 1") from None


def pair(text: str) -> tuple[str, str]:
    """OPTION=VALUE as both."""
    name, found, value = text.partition("=")
    if not found:
        raise ConfigError("{text}: write OPTION=VALUE", text=text)
    return name.strip(), value


def prompts_of(asked: argparse.Namespace) -> list[Prompt]:
    """The prompts of the file and of the command line."""
    found = [*(prompt_files.read(asked.prompts) if asked.prompts else ())]
    found += [prompt_files.parse_line(line) for line in asked.prompt if line.strip()]
    for prompt in found:
        if why := prompt_files.problem_of(prompt):
            raise ConfigError("prompt: {why}", why=why)
    if asked.seed is not None:
        found = [prompt if prompt.seed is not None else replace(prompt, seed=asked.seed) for prompt in found]
    return found


def notes(asked: argparse.Namespace, config: RunConfig) -> Iterator[MessageLike]:
    """What of the prompts will not do what it says. Loads torch."""
    use = replace(config.control_images, guided=True)  # control images are for files beside the model
    about = use, config.shifts_samples, families.family_for(config).sample_multiple
    yield from prompt_checks.notes(asked.prompts, *about) if asked.prompts else ()
    for line in asked.prompt:
        yield from prompt_checks.line_notes(line, *about)


def config_of(path: Path, given: JsonMapping, script_of: Callable[[Path], str]) -> RunConfig:
    """The config to sample with: of a TOML its model and how that fits into memory, of a model's file that model alone.

    `script_of` says which script a TOML is for.
    """
    if path.suffix.lower() == ".toml":
        values = read_toml(path)
        family = families.config_class(script_of(path)).family
    else:
        found = recognised(path)
        if not found.family:
            raise ConfigError("{path} is {words}, and no base model", path=path, words=found.words)
        family, values = found.family, {BASE: str(path), **found.options}
    return build(
        families.config_class(families.lora_script(family)), plan.sampling_values(family, {**values, **given}), notes=[]
    )
