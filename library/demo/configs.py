"""A ready TOML for each script: the demo's own files, and the settings of real trainings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from library import families
from library.config.formats import toml_value
from library.files import write_atomic

# An option, its value, and a comment for the reader: what a real training would use.
Line = tuple[str, Any, str]
Tables = dict[str, list[Line]]

# Suffixes of results' names that differ from the kind.
RESULT_ENDINGS = {"finetune": "full", "textual-inversion": "word"}
DEMO_RATES = {
    "lora": (5e-3, "real: 1e-4"),
    "finetune": (1e-3, "real: 1e-5"),
    "textual-inversion": (5e-3, "real: 5e-4"),
    "lllite": (2e-3, "real: 2e-4"),
}
WORD = "zorb"  # contained in all captions of the demo


def write_demo_configs(
    folder: Path, models: Mapping[str, Mapping[str, Path]], images: Path, output: Path, compiled: bool
) -> dict[str, Path]:
    """Write `<script>.toml` for every family in `models`, `<variant>_<script>.toml` for a variant; return the files by
    these names. Existing files are kept; `compiled` applies to new ones.
    """
    files_by_name = {}
    for model, files in models.items():
        for script in families.facts_of(families.owner(model)).scripts:
            name = toml_name(script, model)
            path = folder / f"{name}.toml"
            if not path.exists():
                write_atomic(path, demo_toml(script, files, images, output, model, compiled))
            files_by_name[name] = path
    return files_by_name


def toml_name(script: str, model: str) -> str:
    return script if model == families.owner(model) else f"{model}_{script}"


def title_of_training(script: str, model: str) -> str:
    """Describe what a script trains, for a family or variant."""
    config = families.config_class(script)
    facts = families.facts_of(config.family)
    name = facts.demo_variants.get(model, facts.title)
    return {"lora": f"LoRA for {name}", "finetune": f"Fine-tuning of {name}"}.get(config.kind, config.title)


def demo_toml(
    script: str, models: Mapping[str, Path], images: Path, output: Path, model: str, compiled: bool = False
) -> str:
    """Return the TOML of one script, for a family or variant, with or without compiling."""
    config = families.config_class(script)
    family = families.facts_of(config.family)
    references = images.with_name("references")
    tables: Tables = {
        "data": [
            ("train_data_dir", str(images), "contains folders named <repeats>_<words>"),
            ("resolution", "192,192", 'real: "1024,1024"'),
            ("train_batch_size", 2, ""),
            ("enable_bucket", True, "images keep their aspect ratio"),
            ("min_bucket_reso", 64, "real: 256"),
            ("max_bucket_reso", 256, "real: 2048"),
            ("bucket_reso_steps", 64, ""),
        ],
        **encoding_tables(),
        **length_tables(60, compiled),
        **output_tables(output, model, config.kind),
    }
    tables |= _learning(config.kind, next(iter(family.adapter_modules)))
    if config().control_images.guided:
        tables["data"].insert(
            1, ("conditioning_data_dir", str(references), "real: edges, depth or poses of the images")
        )
    if config.kind == "textual-inversion" or config().trains_whole_encoders:
        del tables["cache"][1]  # captions are encoded in each step
    family_tables = families.random_module(family.name).demo_tables(models)
    family_tables = (
        family_tables if compiled else {name: lines for name, lines in family_tables.items() if name != "compile"}
    )
    family_tables = {
        name: [(option, str(references) if value == "{references}" else value, why) for option, value, why in lines]
        for name, lines in family_tables.items()
    }
    title_comment = f"# {title_of_training(script, model)}, on the tiny model and the dozen images that the demo made."
    return render_toml([title_comment, *usage_comment(script, model)], merge_tables(tables, family_tables))


def encoding_tables() -> Tables:
    """Return how captions are found, and what is encoded once."""
    return {
        "captions": [("caption_extension", ".txt", "")],
        "cache": [
            ("cache_latents", True, "real: cache_latents_to_disk"),
            ("cache_text_encoder_outputs", True, ""),
        ],
    }


def length_tables(steps: int, compiled: bool) -> Tables:
    """Return the number of steps, their precision, and whether they are compiled."""
    remark = "compiles the blocks of the denoiser before the first step" if compiled else "real, on a GPU: true"
    return {
        "steps": [("max_train_steps", steps, "real: 1000 or more"), ("seed", 42, "")],
        "precision": [("mixed_precision", "no", "real, on a GPU: bf16")],
        "compile": [("compile", compiled, remark)],
    }


def output_tables(output: Path, model: str, kind: str) -> Tables:
    """Return the places of the result and of its logs."""
    return {
        "save": [
            ("output_dir", str(output), ""),
            ("output_name", f"{model}-{RESULT_ENDINGS.get(kind, kind)}", ""),
            ("save_model_as", "safetensors", ""),
            ("save_precision", "fp16", ""),
        ],
        "log": [("logging_dir", str(output / "logs"), "for TensorBoard")],
    }


def usage_comment(script: str, model: str) -> list[str]:
    """Return the comment that says how to train with a TOML."""
    return [
        "# For a real training, change the paths and the values whose comment says so. Start it with:",
        f"#   kohya train {script} --config_file {toml_name(script, model)}.toml",
    ]


def merge_tables(tables: Tables, added: Mapping[str, list[Line]]) -> Tables:
    order = [name for name in ("model", "noise", *tables) if name in added or name in tables]
    return {name: [*tables.get(name, ()), *added.get(name, ())] for name in dict.fromkeys(order)}


def render_toml(head: Sequence[str], tables: Tables) -> str:
    blocks = ["\n".join([f"[{table}]", *map(_toml_line, lines)]) for table, lines in tables.items()]
    return "\n".join(head) + "\n\n" + "\n\n".join(blocks) + "\n"


def _learning(kind: str, module: str) -> Tables:
    """Return the options of what is trained, and its rate."""
    rate, real = DEMO_RATES[kind]
    tables: Tables = {}
    if kind == "lora":
        tables["network"] = [
            ("network_module", module, ""),
            ("network_dim", 8, "real: 16 or 32"),
            ("network_alpha", 8, ""),
            ("network_train_unet_only", True, "the text encoders are not trained"),
        ]
    elif kind == "textual-inversion":
        tables["embedding"] = [
            ("token_string", WORD, "a word that the model does not know"),
            ("num_vectors_per_token", 2, ""),
            ("init_word", "cat", "a word of similar meaning"),
        ]
    elif kind == "lllite":
        tables["control"] = [("network_dim", 8, "real: 64"), ("cond_emb_dim", 8, "real: 32")]
    return {**tables, "optim": [("optimizer_type", "AdamW", ""), ("learning_rate", rate, real)]}


def _toml_line(line: Line) -> str:
    name, value, remark = line
    assignment = f"{name} = {toml_value(value)}"
    return f"{assignment}  # {remark}" if remark else assignment
