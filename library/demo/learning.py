"""The demo that shows a picture of what was learned: the TOML and the sample prompts for a small trained model."""

from collections.abc import Mapping
from pathlib import Path

from library import families
from library.demo import configs, zorb
from library.demo.configs import Line, Tables, title_of_training, toml_name
from library.demo.small_model import KNOWN_PICTURES, small_model_of
from library.families.facts import SmallModel
from library.files import write_atomic

KINDS = ("lora", "finetune")  # of training that start from the small model
# What each prompt shows, with the prompt and its seed.
DEMO_PROMPTS = (
    ("what the training images show", f"{zorb.NAME} emoji on a blue ground", 1),
    ("the same on a ground that none of them has", f"{zorb.NAME} emoji on a {zorb.UNSEEN_GROUND} ground", 2),
    ("two things that the model knew before", "red apple emoji on a white ground", 3),
    ("", "cat face emoji on a blue ground", 4),
)


def scripts(family: str) -> list[str]:
    family_scripts = families.facts_of(family).scripts if small_model_of(family) else ()
    return [script for script in family_scripts if families.config_class(script).kind in KINDS]


def write_learning_files(folder: Path, family: str, files: Mapping[str, Path], compiled: bool) -> dict[str, Path]:
    """Write the sample prompts and a TOML for each script that trains the small model; the TOML files by script. A file
    that exists is kept as it is."""
    prompts = folder / f"{family}-prompts.txt"
    small = small_model_of(family)
    assert small is not None
    if not prompts.exists():
        write_atomic(prompts, prompt_text(small))
    tomls = {}
    for script in scripts(family):
        path = tomls[script] = folder / f"{toml_name(script, family)}.toml"
        if not path.exists():
            write_atomic(path, learning_toml(script, small, files, folder, compiled))
    return tomls


def prompt_text(small: SmallModel) -> str:
    """Return the prompt file: what the training images show, and what the model knew before."""
    lines = []
    for about, prompt, seed in DEMO_PROMPTS:
        lines += [f"# {about}"] if about else []
        lines.append(f"{prompt} {small.prompt} --d {seed}")
    return "\n".join(lines) + "\n"


def learning_toml(script: str, small: SmallModel, files: Mapping[str, Path], folder: Path, compiled: bool) -> str:
    """Return the TOML of one script; all files that it names are in the demo's folder."""
    config = families.config_class(script)
    family, output = config.family, folder / "output"
    tables: Tables = {
        "data": [
            ("train_data_dir", str(folder / zorb.NAME), "contains folders named <repeats>_<words>"),
            (
                "reg_data_dir",
                str(folder / KNOWN_PICTURES),
                "other images, so that the model does not forget what it knows",
            ),
            ("resolution", f"{zorb.SIDE},{zorb.SIDE}", 'real: "1024,1024"'),
            ("train_batch_size", 4, "real: 1 or 2"),
        ],
        **configs.encoding_tables(),
        **_learning(config.kind, small, next(iter(families.facts_of(family).adapter_modules))),
        **configs.length_tables(small.steps, compiled),
        "sample": [
            ("sample_prompts", str(folder / f"{family}-prompts.txt"), ""),
            ("sample_at_first", True, "images of the base model"),
            ("sample_every_n_steps", small.steps // 2, ""),
        ],
        **configs.output_tables(output, family, config.kind),
    }
    model_tables = {name: lines for name, lines in small.tables(files).items() if compiled or name != "compile"}
    title = title_of_training(script, family)
    title_comment = f"# {title}: a small trained model learns the {zorb.NAME}, a character that is new to it."
    return configs.render_toml(
        [title_comment, *configs.usage_comment(script, family)], configs.merge_tables(tables, model_tables)
    )


def _learning(kind: str, small: SmallModel, module: str) -> Tables:
    """Return what is trained and the rates, at which a large model would forget all else."""
    optim: list[Line] = [
        ("optimizer_type", "AdamW", ""),
        ("learning_rate", small.rates[kind], "real: 1e-4" if kind == "lora" else "real: 1e-5"),
    ]
    if kind != "lora":
        return {"optim": optim}
    network: list[Line] = [
        ("network_module", module, ""),
        ("network_dim", small.rank, "real: 16 or 32"),
        ("network_alpha", small.alpha, ""),
        ("network_train_unet_only", True, "the text encoders are not trained"),
        ("prior_loss_weight", 0.5, "how much the images in reg_data_dir count"),
    ]
    return {"network": network, "optim": optim}
