"""`kohya sample`: images of a base model with LoRA files, side by side, on a GPU that no training uses."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from library import families
from library.config.arguments import Arguments
from library.config.building import Layer, Reading, read_layers
from library.config.formats import read_toml
from library.config.json_types import JsonMapping, JsonValue
from library.config.places import real_place
from library.config.problems import ConfigError, Message, MessageLike, Problem, collecting, raise_if_any
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.config.strengths import weighted_file
from library.families.recognition import recognise_file
from library.jobs.work import join_work
from library.runs import gpu_slots
from library.runs.gpu_wait import reserve_devices
from library.sampling import plan, prompt_checks, trigger_words
from library.sampling.prompts import RANDOM_SEED, Prompt, find_value_problems, parse_line_at, read_prompts

if TYPE_CHECKING:
    from library.sampling.sheet import Sheet

EXIT_DONE = 0
MODEL_OPTION = "pretrained_model_name_or_path"
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class SampleInputs:
    """What a command asks to generate: a model, columns of files, and prompts."""

    config: RunConfig
    columns: list[plan.Column]
    prompts: list[Prompt]


def main(argv: list[str], script_of: Callable[[Path], str]) -> int:
    """Generate images and return the exit code 0. `script_of` returns the script of a TOML. Raises ConfigError."""
    arguments = build_sample_parser().parse_args(argv)
    inputs = read_inputs(arguments, script_of)
    word = arguments.word or word_of(arguments.config)
    with join_work("sample") as work, reserve_devices({"cpu": arguments.cpu}, work.wait) as devices:
        os.environ.update(gpu_slots.device_environment(devices))
        # PyTorch has not looked for GPUs yet, which it does once.
        generate = families.load_object("library.sampling.generate:generate")
        loras = (path for column in inputs.columns for path, _ in column.loras)
        misspelt = trigger_words.misspelt(loras, inputs.prompts)
        notes = [*sampling_notes(arguments, inputs.config), *misspelt]
        work.store({"warnings": notes})

        def store(sheet: "Sheet") -> None:
            work.store({**sheet.as_json(), "warnings": notes})
            if not work.folder and not sheet.grid:
                print(next(name for row in reversed(sheet.files) for name in reversed(row) if name), flush=True)

        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        sheet = generate(inputs.config, inputs.columns, inputs.prompts, arguments.out, work.phase, store, word)
        print(sheet.grid)
    return EXIT_DONE


def build_sample_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    arguments = Arguments(
        "kohya sample",
        example='kohya sample run.toml --lora cat.safetensors --prompt "a cat"',
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
        "--word",
        default="",
        help="the word of embeddings, if neither they nor the TOML state one (default: the name of the file)",
    )
    arguments.add_argument(
        "--compare",
        choices=plan.COMPARE,
        default="together",
        help="all files together, beside the base model, at several strengths, or each file alone",
    )
    arguments.add_argument(
        "--strengths",
        default=", ".join(f"{strength:g}" for strength in plan.STRENGTHS),
        help="factors of the files' strengths for --compare strengths",
    )
    arguments.add_argument("--prompt", action="append", default=[], help="what to generate, as a line of a prompt file")
    arguments.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt file")
    arguments.add_argument(
        "--seed", type=int, help="for prompts that have none; without it, or with -1, the same random one for all"
    )
    arguments.add_argument(
        "--out", type=Path, default=Path("generated"), metavar="FOLDER", help="folder for the images"
    )
    arguments.add_argument("--cpu", action="store_true", help="generate on the CPU")
    return arguments


def read_inputs(arguments: argparse.Namespace, script_of: Callable[[Path], str]) -> SampleInputs:
    """Return what is to be generated. Raises ConfigError with all problems, of the words and of what they name."""
    problems: list[Problem] = []
    loras = [(Path(name), weight) for name, weight in _parse_each(weighted_file, arguments.lora, problems)]
    options = _values_by_name(_parse_each(parse_option, arguments.set, problems))
    columns, strengths, prompts = [], list(plan.STRENGTHS), list[Prompt]()
    with collecting(problems):
        strengths = parse_strengths(arguments.strengths)
    if len(loras) == len(arguments.lora):
        with collecting(problems):
            columns = plan.plan_columns(arguments.compare, loras, strengths)
    with collecting(problems):
        prompts = prompts_to_sample(arguments)
        plan.check_image_count(len(columns), prompts)
    reading: Reading[RunConfig] | None = None
    with collecting(problems):
        reading = read_sample_config(arguments.config, options, script_of)
        problems += reading.problems
    # Loads torch, but asks for no GPU: the wait decides which one it is.
    find = families.load_object("library.sampling.generate:find_further_problems")
    problems += find(reading, prompts, [path for path, _ in loras], arguments.out)
    if problems or reading is None:
        raise ConfigError(*problems)
    return SampleInputs(reading.config, columns, prompts)


def _values_by_name(pairs: Iterable[tuple[str, str]]) -> dict[str, JsonValue]:
    """Return the value of each option: the last one, or all of sample_lora, which takes several files."""
    texts: dict[str, list[JsonValue]] = {}
    for name, value in pairs:
        texts.setdefault(name, []).append(value)
    return {name: several if several[1:] and name == "sample_lora" else several[-1] for name, several in texts.items()}


def _parse_each(parse: Callable[[str], Parsed], texts: Iterable[str], problems: list[Problem]) -> list[Parsed]:
    parsed = []
    for text in texts:
        with collecting(problems):
            parsed.append(parse(text))
    return parsed


def word_of(config: Path) -> str:
    return str(read_toml(config).get("token_string") or "") if config.suffix.lower() == ".toml" else ""


def parse_strengths(text: str) -> list[float]:
    """Parse comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError("strengths are numbers separated by commas, such as 0, 0.5, 1") from None


def parse_option(text: str) -> tuple[str, str]:
    """Split OPTION=VALUE."""
    name, separator, value = text.partition("=")
    if not (separator and name.strip()):
        raise ConfigError("{text}: write OPTION=VALUE", text=text)
    return name.strip(), value


def prompts_to_sample(arguments: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the file and of the command line. Raises ConfigError with everything wrong in them."""
    prompts, problems = list[Prompt](), list[Problem]()
    if arguments.prompts:
        with collecting(problems):
            prompts += read_prompts(arguments.prompts)
    for line in filter(str.strip, arguments.prompt):
        with collecting(problems):
            prompts.append(parse_line_at(Message("the prompt"), line))
    if arguments.seed not in (None, RANDOM_SEED):
        prompts = [prompt if prompt.seed is not None else replace(prompt, seed=arguments.seed) for prompt in prompts]
    for why in dict.fromkeys(why for prompt in prompts for why in find_value_problems(prompt)):
        problems.append(Problem("", "prompt: {why}", why=why))
    raise_if_any(problems)
    return prompts


def sampling_notes(arguments: argparse.Namespace, config: RunConfig) -> Iterator[MessageLike]:
    """Return options of the prompts that will have no effect. Loads torch."""
    yield from _merged_notes(arguments, config)
    prompt_use = families.load_object("library.sampling.prompt_use:prompt_use")
    # LLLite files use control images.
    use = prompt_use(config, families.family_for(config), replace(config.control_images, guided=True))
    yield from prompt_checks.notes(arguments.prompts, use) if arguments.prompts else ()
    for line in arguments.prompt:
        yield from prompt_checks.line_notes(line, use)


def _merged_notes(arguments: argparse.Namespace, config: RunConfig) -> Iterator[MessageLike]:
    """Yield the files of the TOML's base_weights, and those of them that --lora adds once more."""
    files = config.network.base_weights if isinstance(config, AdapterRun) else ()
    if files:
        template = "base_weights are merged into the model, as in the training: {files}; --set {unset} leaves them out"
        yield Message(template, files=", ".join(files), unset="base_weights=")
    merged = {real_place(file) for file in files}
    for path in (Path(weighted_file(text)[0]) for text in arguments.lora):
        if real_place(path) in merged:
            yield Message("--lora {file} is among the base_weights, too, so it counts twice", file=path)


def read_sample_config(path: Path, options: JsonMapping, script_of: Callable[[Path], str]) -> Reading[RunConfig]:
    """Read the config to sample with: from a TOML its model and memory options, from a model's file that model alone.

    `script_of` returns the script of a TOML. Raises ConfigError for a file that is neither.
    """
    if path.suffix.lower() == ".toml":
        kind = families.config_class(script_of(path))
        values = plan.sampling_values(kind, read_toml(path))
    else:
        recognised = recognise_file(path)
        if not recognised.family:
            raise ConfigError("{path} is {words}, not a base model", path=path, words=recognised.words)
        kind = families.config_class(families.lora_script(recognised.family))
        values = {MODEL_OPTION: str(path), **recognised.options}
    if "base_weights" in options:  # its own strengths, not those of the TOML's files
        values = {name: value for name, value in values.items() if name != "base_weights_multiplier"}
    sampled = families.config_class(families.lora_script(kind.family))
    reading = read_layers(sampled, [Layer(plan.sampling_values(sampled, {**values, **options}))])
    return replace(reading, problems=[*plan.option_problems(kind.family, options), *reading.problems])
