"""What every program in versus.py trains on: model files with random weights, tokenizers, images, and the TOML."""

import json
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
CASES = HERE / "benchmarks" / "versus.toml"
SIZES = ((1024, 1024), (832, 1216), (1216, 832))  # of images, width and height: as large as their buckets
TINY_SIZES = ((128, 128), (64, 256), (256, 64))
# Of tiny models: those of the real ones, as sd-scripts has written them into its code. It has the real widths, too.
TINY_DEPTHS = {"sdxl": {"unet": (32, 64, 128), "depth": (0, 2, 10)}}
# Where sd-scripts looks for tokenizers in tokenizer_cache_dir.
TOKENIZERS = ("openai_clip-vit-large-patch14", "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k", "google_t5-v1_1-xxl")
# transformers before 5 cannot read what version 5 writes here.
T5_CONFIG = {"tokenizer_class": "T5Tokenizer", "model_max_length": 512, "extra_ids": 0, "eos_token": "</s>",
             "unk_token": "<unk>", "pad_token": "<pad>"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training that every program does."""

    family: str
    kind: str  # lora or full
    name: str
    options: dict[str, Any]  # of its TOML, besides the folders
    own: tuple[str, ...]  # the options that make the case

    @property
    def script(self) -> str:
        """The file that does it, by its name in sd-scripts."""
        return f"{self.family}_train" + ("_network" if self.kind == "lora" else "")

    @property
    def title(self) -> str:
        """What the table and --cases call it."""
        return f"{self.family} {self.kind} {self.name}"


def cases(tiny: bool, steps: int, path: Path = CASES) -> Iterator[Case]:
    """All cases of the file, with so many steps each."""
    known = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, case in known["case"].items():
        if tiny and not case.get("tiny", True):
            continue
        for family in case.get("families", known["family"]):
            for kind in case["kinds"]:
                layers = [known["all"], known["family"][family], known["kind"][kind],
                          known["both"].get(f"{family}_{kind}", {}), case["options"]]  # fmt: skip
                layers += [known["tiny"]] if tiny else []
                options = {name: value for layer in layers for name, value in layer.items()}
                yield Case(family, kind, name, options | {"max_train_steps": steps}, tuple(case["options"]))


def write_toml(case: Case, folder: Path, inputs: Path) -> Path:
    """The TOML of a case, flat as sd-scripts has it."""
    places = {"{models}": (inputs / "models").as_posix(), "{tokenizers}": (inputs / "tokenizers").as_posix()}
    text = json.dumps(case.options)
    for name, place in places.items():
        text = text.replace(name, place)
    path = folder / f"{case.title.replace(' ', '-')}.toml"
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in json.loads(text).items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def make(inputs: Path, families: set[str], tiny: bool) -> None:
    """Models, tokenizers and images, as far as they are not there yet."""
    from library.demo import images

    pictures = inputs / "images"
    if not pictures.exists():
        images.write(pictures, sizes=(TINY_SIZES if tiny else SIZES) * 2)
    for family in sorted(families):
        if not (inputs / "models" / f"{family}.safetensors").exists():
            make_model(inputs, family, tiny)


def make_model(inputs: Path, family: str, tiny: bool) -> None:
    """The files of a family's model, under the names that the TOML has, and its tokenizers."""
    from library.families import random_module

    module, place = random_module(family), inputs / "models" / family
    written = module.write(place, sizes=replace(module.TINY, **TINY_DEPTHS.get(family, {})) if tiny else module.FULL)
    files = written if isinstance(written, dict) else {family: written}
    for part, path in files.items():
        if Path(path).is_file():
            shutil.move(path, inputs / "models" / f"{part}.safetensors")
    second = place / "tokenizer_2"
    names = zip((place / "tokenizer", second), (TOKENIZERS[0], TOKENIZERS[2 if "t5xxl" in files else 1]), strict=True)
    for folder, name in names:
        shutil.copytree(folder, inputs / "tokenizers" / name, dirs_exist_ok=True)
    if "t5xxl" in files:
        config = inputs / "tokenizers" / TOKENIZERS[2] / "tokenizer_config.json"
        config.write_text(json.dumps(T5_CONFIG), encoding="utf-8")
