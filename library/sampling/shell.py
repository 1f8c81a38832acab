"""`kohya sample`: images of a base model with LoRA files, side by side, on a GPU that no training uses."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from library import families
from library.config.arguments import Arguments
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, MessageLike
from library.config.run_config import RunConfig
from library.families.recognition import recognise_file
from library.jobs.work import join_work
from library.runs import gpu_slots
from library.runs.gpu_wait import free_devices
from library.sampling import plan, prompt_checks
from library.sampling import prompts as prompt_files
from library.sampling.prompts import Prompt

if TYPE_CHECKING:
    from library.sampling.generate import Sheet

EXIT_DONE = 0
MODEL_OPTION = "pretrained_model_name_or_path"


def main(argv: list[str], script_of: Callable[[Path], str]) -> int:
    """Generate images and return the exit code 0. `script_of` returns the script of a TOML. Raises ConfigError."""
    arguments = build_sample_parser().parse_args(argv)
    loras = [weighted(text) for text in arguments.lora]
    strengths = parse_strengths(arguments.strengths)
    columns = plan.plan_columns(arguments.compare, loras, strengths)
    prompts = prompts_to_sample(arguments)
    plan.check_image_count(len(columns), prompts)
    config = config_to_sample(arguments.config, dict(parse_option(text) for text in arguments.set), script_of)
    word = arguments.word or word_of(arguments.config)
    with join_work("sample") as work, free_devices({"cpu": arguments.cpu}, work.wait) as devices:
        os.environ.update(gpu_slots.device_environment(devices))
        # Loads torch, which detects GPUs only once.
        generate = families.load_object("library.sampling.generate:generate")

        def store(sheet: "Sheet") -> None:
            work.store(sheet.as_json())
            if not work.folder and not sheet.grid:
                print(next(name for row in reversed(sheet.files) for name in reversed(row) if name), flush=True)

        for note in sampling_notes(arguments, config):
            print(f"note: {note}", file=sys.stderr)
        sheet = generate(config, columns, prompts, arguments.out, work.phase, store, word)
        print(sheet.grid)
    return EXIT_DONE


def build_sample_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    arguments = Arguments(
        "kohya sample",
        description="Generate images with a base model and LoRA, embedding or LLLite files, side by side. Waits while "
        "a training uses the GPU.",
    )
    arguments.add_argument(
        "config", type=Path, help="the TOML of a training, or a base model (.safetensors or diffusers)"
    )
    arguments.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the model, such as t5xxl=FILE; may be given several times",
    )
    arguments.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[=STRENGTH]",
        help="a LoRA, LyCORIS, embedding or LLLite file; may be given several times",
    )
    arguments.add_argument(
        "--word", default="", help="the word of embeddings, if neither they nor the TOML say it; else their name"
    )
    arguments.add_argument(
        "--compare",
        choices=plan.COMPARE,
        default="together",
        help="together, at several strengths, or each file by itself as for epochs",
    )
    arguments.add_argument(
        "--strengths",
        default=", ".join(f"{strength:g}" for strength in plan.STRENGTHS),
        help="factors of the files' strengths for --compare strengths",
    )
    arguments.add_argument("--prompt", action="append", default=[], help="what to generate, as a line of a prompt file")
    arguments.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt file")
    arguments.add_argument("--seed", type=int, help="for prompts that have none; else a random one, the same for all")
    arguments.add_argument(
        "--out", type=Path, default=Path("generated"), metavar="FOLDER", help="where images are kept"
    )
    arguments.add_argument("--cpu", action="store_true", help="generate on the processor")
    return arguments


def weighted(text: str) -> tuple[Path, float]:
    """Split FILE=0.8 into file and strength, by default 1. A file name may contain "="."""
    path, separator, number = text.rpartition("=")
    if not separator or Path(text).is_file():
        path, number = text, "1"
    try:
        return Path(path), float(number)
    except ValueError:
        raise ConfigError("{text}: the strength is no number, write FILE=0.8", text=text) from None


def word_of(config: Path) -> str:
    return str(read_toml(config).get("token_string") or "") if config.suffix.lower() == ".toml" else ""


def parse_strengths(text: str) -> list[float]:
    """Parse comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError("strengths are numbers with commas between, such as 0, 0.5, 1") from None


def parse_option(text: str) -> tuple[str, str]:
    """Split OPTION=VALUE."""
    name, separator, value = text.partition("=")
    if not (separator and name.strip()):
        raise ConfigError("{text}: write OPTION=VALUE", text=text)
    return name.strip(), value


def prompts_to_sample(arguments: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the file and of the command line."""
    prompts = [*(prompt_files.read_prompts(arguments.prompts) if arguments.prompts else ())]
    prompts += [prompt_files.parse_line(line) for line in arguments.prompt if line.strip()]
    if arguments.seed is not None:
        prompts = [prompt if prompt.seed is not None else replace(prompt, seed=arguments.seed) for prompt in prompts]
    for prompt in prompts:
        if why := prompt_files.problem_of(prompt):
            raise ConfigError("prompt: {why}", why=why)
    return prompts


def sampling_notes(arguments: argparse.Namespace, config: RunConfig) -> Iterator[MessageLike]:
    """Return options of the prompts that will have no effect. Loads torch."""
    use = replace(config.control_images, guided=True)  # LLLite files use control images
    model_facts = use, config.shifts_samples, families.family_for(config).sample_multiple
    yield from prompt_checks.notes(arguments.prompts, *model_facts) if arguments.prompts else ()
    for line in arguments.prompt:
        yield from prompt_checks.line_notes(line, *model_facts)


def config_to_sample(path: Path, options: JsonMapping, script_of: Callable[[Path], str]) -> RunConfig:
    """Return the config to sample with: from a TOML its model and memory options, from a model's file that model alone.

    `script_of` returns the script of a TOML.
    """
    if path.suffix.lower() == ".toml":
        values = read_toml(path)
        family = families.config_class(script_of(path)).family
    else:
        recognised = recognise_file(path)
        if not recognised.family:
            raise ConfigError("{path} is {words}, and no base model", path=path, words=recognised.words)
        family, values = recognised.family, {MODEL_OPTION: str(path), **recognised.options}
    if problems := [*plan.option_problems(family, options)]:
        raise ConfigError(*problems)
    return build_config(
        families.config_class(families.lora_script(family)),
        plan.sampling_values(family, {**values, **options}),
        notes=[],
    )
