"""The plan of a comparison: a column per setting of the LoRA files, a row per prompt. Loads no torch."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from library import families
from library.config.building import understood
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Problem, raise_if_any
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.strengths import MAX_STRENGTH
from library.config.values import did_you_mean
from library.files import names_apart
from library.sampling.prompts import RANDOM_SEED, Prompt, drawn_seed

COMPARE = ("together", "base", "strengths", "files")
BASE_MODEL = "base model"  # the title of its column
STRENGTHS = (0.0, 0.5, 1.0)
MAX_IMAGES = 200  # images per comparison
# Number formats of a frozen model, which a whole model that is trained does not have.
FEW_BITS = ("fp8_base", "fp8_base_unet", "fp8_compute", "int8_base", "int8_compute", "int8_rotation", "base_bits")
# Options besides the model's: number formats, memory, sampler, how passes are compiled and recorded, what is merged
# into the model, and how noise and references are made. tests/sampling/test_sampled_options.py decides about others.
OPTIONS = (
    "mixed_precision",
    *FEW_BITS,
    *("blocks_to_swap", "offload_modulation"),
    *("attention_kernel", "sdpa", "xformers"),
    *("sample_sampler", "sample_steps", "sample_scale", "sample_guidance_scale", "sample_shift", "sample_sigmas"),
    *("sample_lora", "sample_batch_size", "sample_cache", "sample_attention", "sample_compile"),
    *("compile_backend", "compile_mode", "compile_dynamic", "compile_fullgraph", "compile_cache_size_limit"),
    *("compile_blocks", "compile_cache_dir", "cuda_graphs", "cuda_allow_tf32", "cuda_cudnn_benchmark"),
    *("base_weights", "base_weights_multiplier", "zero_terminal_snr", "transparent_background"),
)
OF_STEPS = ("t5xxl_train_length",)  # options of the model that no image depends on

Weighted = Sequence[tuple[Path, float]]  # LoRA files and their strengths


@dataclass(frozen=True)
class Column:
    """The LoRA files of one column with their strengths; none is the base model alone."""

    title: str
    loras: tuple[tuple[Path, float], ...]


def plan_columns(compare: str, loras: Weighted, strengths: Sequence[float] = STRENGTHS) -> list[Column]:
    """Return the columns of a comparison: all files together, the base model beside them, all at several strengths, or
    each alone. Raises ConfigError for files that cannot be compared.
    """
    names = names_apart([path.with_suffix("") for path, _ in loras])
    titles = [_title_with_strength(name, strength) for name, (_, strength) in zip(names, loras, strict=True)]
    raise_if_any([*_column_problems(compare, loras, strengths)])
    if compare == "files":
        return [Column(title, (lora,)) for title, lora in zip(titles, loras, strict=True)]
    if compare == "strengths":
        return [Column(f"× {by:g}", tuple((path, strength * by) for path, strength in loras)) for by in strengths]
    together = Column(", ".join(titles) or BASE_MODEL, tuple(loras))
    return [Column(BASE_MODEL, ()), together] if compare == "base" and loras else [together]


def _column_problems(compare: str, loras: Weighted, strengths: Sequence[float]) -> Iterator[Problem]:
    if len({path for path, _ in loras}) < len(loras):
        yield Problem("", "A LoRA file is named twice: name each once.")
    for value in dict.fromkeys((*strengths, *(strength for _, strength in loras))):
        if not math.isfinite(value) or abs(value) > MAX_STRENGTH:
            template = "Strengths are numbers from -{most} to {most}, not {value}"
            yield Problem("", template, most=MAX_STRENGTH, value=f"{value:g}")
    if compare in ("strengths", "files") and not loras:
        yield Problem("", "There is nothing to compare without a LoRA: choose a file.")
    if compare == "strengths" and not strengths:
        yield Problem("", "There are no strengths to compare: name some, such as 0, 0.5, 1.")


def sampling_values(kind: type[RunConfig], values: JsonMapping) -> JsonObject:
    """Return the values of a config of a kind that affect sampling."""
    effective = sampling_options(kind.family) - ({*FEW_BITS} if not kind.adapters else set())
    return {name: value for name, value in values.items() if name in effective}


def sampling_options(family: str) -> set[str]:
    """Return the names of the options that affect sampling."""
    options = options_of(families.config_class(families.lora_script(family)))
    of_model = {name for name, option in options.items() if option.section == "model" and name not in OF_STEPS}
    return options.keys() & (of_model | {*OPTIONS})


def option_problems(family: str, names: Iterable[str]) -> Iterator[Problem]:
    """Yield names that are no options, or options without effect on sampling."""
    effective, config = sampling_options(family), families.config_class(families.lora_script(family))
    for name in names:
        if name in options_of(config):
            if name not in effective:
                yield Problem(name, "has no effect on images; leave it out")
        elif name not in understood(config):
            hint = did_you_mean(name, effective)
            yield Problem(name, "is not an option{hint}", hint=hint)


def with_one_seed(prompts: Sequence[Prompt], seed: int | None = None) -> list[Prompt]:
    """Give this seed to all prompts that have none; None or -1 draw one."""
    # With one seed, columns differ by their files alone.
    if seed in (None, RANDOM_SEED):
        seed = drawn_seed()
    return [prompt if prompt.seed is not None else replace(prompt, seed=seed) for prompt in prompts]


def check_image_count(number_of_columns: int, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError without prompts, or with too many images."""
    if not prompts:
        raise ConfigError("There is nothing to generate: write a prompt.")
    if number_of_columns * len(prompts) > MAX_IMAGES:
        raise ConfigError(
            "{count} images are too many at once, at most {most}: compare fewer",
            count=number_of_columns * len(prompts),
            most=MAX_IMAGES,
        )


def image_metadata(
    prompt: Prompt, steps: int, column: Column, model: str, tagged: Collection[Path] = ()
) -> dict[str, str]:
    """Return PNG texts of an image: `parameters` as other programs read them, and everything as JSON. `steps` are those
    that the sampler takes; `tagged` LoRA files get other programs' <lora:...> tags.
    """
    prompt_options: JsonObject = {name: value for name, value in asdict(prompt).items() if value is not None}
    if steps != prompt.sample_steps:
        prompt_options["steps_taken"] = steps
    tags = "".join(f" <lora:{path.stem}:{strength:g}>" for path, strength in column.loras if path in tagged)
    text = [prompt.prompt + tags]
    if prompt.negative_prompt:
        text.append(f"Negative prompt: {prompt.negative_prompt}")
    facts = {
        "Steps": steps,
        "CFG scale": prompt.scale,
        "Distilled CFG Scale": prompt.guidance_scale,
        "Seed": prompt.seed,
        "Size": f"{prompt.width}x{prompt.height}",
        "Model": Path(model).stem,
    }
    text.append(", ".join(f"{name}: {value}" for name, value in facts.items() if value is not None))
    loras = [{"file": path.name, "strength": strength} for path, strength in column.loras]
    everything = json.dumps({"model": Path(model).name, "loras": loras, **prompt_options}, ensure_ascii=False)
    return {"parameters": "\n".join(text), "kohya": everything}


def _title_with_strength(name: str, strength: float) -> str:
    return name if strength == 1 else f"{name} × {strength:g}"
