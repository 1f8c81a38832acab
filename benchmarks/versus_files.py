"""What every program in versus.py trains on: model files with random weights, tokenizers, images, caches and TOML.

For families whose caches are musubi-tuner's the caches are random, too, so that no program needs their text encoder,
and a full-size model has one random block many times, as drawing and holding 41 GB would take long.
"""

import json
import random
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

PROJECT_ROOT = Path(__file__).resolve().parents[1]
VERSUS_CASES_FILE = PROJECT_ROOT / "benchmarks" / "versus.toml"
IMAGE_SIZES = ((1024, 1024), (832, 1216), (1216, 832))  # of images, width and height: as large as their buckets
TINY_SIZES = ((128, 128), (64, 256), (256, 64))
# Of tiny models: those of the real ones, as sd-scripts has written them into its code. It has the real widths, too.
TINY_DEPTHS = {"sdxl": {"unet": (32, 64, 128), "depth": (0, 2, 10)}}
CAPTION_TOKENS = (90, 180)  # at least and at most
# Where sd-scripts looks for tokenizers in tokenizer_cache_dir.
TOKENIZERS = ("openai_clip-vit-large-patch14", "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k", "google_t5-v1_1-xxl")
# transformers before 5 cannot read what version 5 writes here.
T5_CONFIG = {
    "tokenizer_class": "T5Tokenizer",
    "model_max_length": 512,
    "extra_ids": 0,
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


@dataclass(frozen=True)
class VersusCase:
    """One training that every program does."""

    family: str  # or a relative of one, by its name in the demo
    kind: str  # lora or full
    name: str
    options: dict[str, Any]  # of its TOML, besides the folders
    own: tuple[str, ...]  # the options that make the case

    @property
    def script(self) -> str:
        """The file that does it, by its name in sd-scripts."""
        from library import families

        of_family = families.facts_of(families.owner(self.family)).scripts
        return next(script for script in of_family if families.config_class(script).adapters == (self.kind == "lora"))

    @property
    def shown(self) -> bool:
        return bool(find_subject(self.family).config.control_images.least)

    @property
    def title(self) -> str:
        return f"{self.family} {self.kind} {self.name}"


def known_families() -> tuple[str, ...]:
    return tuple(tomllib.loads(VERSUS_CASES_FILE.read_text(encoding="utf-8"))["family"])


def versus_cases(tiny: bool, steps: int) -> Iterator[VersusCase]:
    """All cases of the file, with so many steps each."""
    tables = tomllib.loads(VERSUS_CASES_FILE.read_text(encoding="utf-8"))
    for name, case in tables["case"].items():
        if tiny and not case.get("tiny", True):
            continue
        for family in case.get("families", tables["family"]):
            for kind in case["kinds"]:
                layers = [
                    tables["all"],
                    tables["family"][family],
                    tables["kind"][kind],
                    tables["both"].get(f"{family}_{kind}", {}),
                    case["options"],
                ]
                layers += [tables["tiny"]] if tiny else []
                options = {name: value for layer in layers for name, value in layer.items()}
                yield VersusCase(family, kind, name, options | {"max_train_steps": steps}, tuple(case["options"]))


def plain_case(family: str, tiny: bool, steps: int) -> VersusCase:
    """The LoRA of a family without an option that saves memory."""
    cases = versus_cases(tiny, steps)
    return next(case for case in cases if (case.family, case.kind, case.name) == (family, "lora", "plain"))


def write_toml(case: VersusCase, folder: Path, inputs: Path) -> Path:
    return write_flat(folder / f"{case.title.replace(' ', '-')}.toml", filled(case, inputs))


def filled(case: VersusCase, inputs: Path) -> dict[str, Any]:
    """The options of a case with the folders of models and tokenizers."""
    places = {"{models}": (inputs / "models").as_posix(), "{tokenizers}": (inputs / "tokenizers").as_posix()}
    text = json.dumps(case.options)
    for name, place in places.items():
        text = text.replace(name, place)
    return json.loads(text)


def write_flat(path: Path, options: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()), encoding="utf-8")
    return path


MUSUBI_SCRIPTS = {"krea_2_train_network": "krea2_train_network"}  # where it has another name
# What musubi-tuner calls some options. Those of images are in its file of data sets; of the rest it has not all.
MUSUBI_OPTIONS = {"pretrained_model_name_or_path": "dit"}
MUSUBI_DATA = {
    "caption_extension": "caption_extension",
    "enable_bucket": "enable_bucket",
    "train_batch_size": "batch_size",
}
NOT_MUSUBI = (
    "tokenizer_cache_dir",
    "resolution",
    "min_bucket_reso",
    "max_bucket_reso",
    "bucket_reso_steps",
    "cache_latents",
    "cache_latents_to_disk",
    "cache_text_encoder_outputs",
    "cache_text_encoder_outputs_to_disk",
    "save_precision",
    "save_model_as",
    "network_train_unet_only",
)


def write_musubi(case: VersusCase, folder: Path, inputs: Path, images: Path) -> Path:
    """The TOML of a case as musubi-tuner has it, and beside it that of its data sets. 8-bit weights have scales there,
    as it recommends."""
    options = filled(case, inputs)
    width, _, height = str(options["resolution"]).partition(",")
    general = {"resolution": [int(width), int(height)]}
    general |= {theirs: options[ours] for ours, theirs in MUSUBI_DATA.items()}
    sets = [
        {"image_directory": place.as_posix(), "num_repeats": int(place.name.partition("_")[0])}
        | ({"control_directory": place.as_posix()} if case.shown else {})
        for place in sorted(images.iterdir())
        if place.is_dir()
    ]
    tables = ["[general]", *(f"{name} = {json.dumps(value)}" for name, value in general.items())]
    for subset in sets:
        tables += ["", "[[datasets]]", *(f"{name} = {json.dumps(value)}" for name, value in subset.items())]
    stem = f"{case.title.replace(' ', '-')}-musubi"
    data = folder / f"{stem}-data.toml"
    data.write_text("\n".join(tables) + "\n", encoding="utf-8")
    left_out = {*MUSUBI_DATA, *NOT_MUSUBI}
    settings = {MUSUBI_OPTIONS.get(name, name): value for name, value in options.items() if name not in left_out}
    settings |= {"dataset_config": data.as_posix()} | ({"fp8_scaled": True} if options.get("fp8_base") else {})
    return write_flat(folder / f"{stem}.toml", settings)


def make_versus_inputs(inputs: Path, families: set[str], tiny: bool) -> None:
    """Models, tokenizers, images and caches, as far as they are not there yet."""
    from library.demo import images

    pictures = inputs / "images"
    if not pictures.exists():
        images.draw_images(pictures, sizes=(TINY_SIZES if tiny else IMAGE_SIZES) * 2)
        lengthen_captions(pictures)
    for family in sorted(families):
        if not model_file(inputs, family, family).exists():
            make_model(inputs, family, tiny)


def lengthen_captions(pictures: Path) -> None:
    """Write captions of digits, each of which is a token: as long as captions of a vision model."""
    lengths = random.Random(0)
    for caption in sorted(pictures.rglob("*.txt")):
        caption.write_text("7" * lengths.randrange(*CAPTION_TOKENS), encoding="utf-8")


def model_file(inputs: Path, family: str, part: str) -> Path:
    """Where the TOML expects a file of a family's model; `part` is the family's name for the base model itself."""
    from library import families

    table = tomllib.loads(VERSUS_CASES_FILE.read_text(encoding="utf-8"))["family"][family]
    option = "pretrained_model_name_or_path" if part in (family, families.owner(family)) else part
    named = next((value for value in table.values() if str(value).endswith(f"/{part}.safetensors")), "")
    place = table.get(option) or named or f"{{models}}/{part}.safetensors"
    return Path(place.format(models=inputs / "models"))


def make_model(inputs: Path, family: str, tiny: bool) -> None:
    """The files of a family's model, under the names that the TOML has, its tokenizers, and caches in musubi-tuner's
    format where the family has such."""
    from library.families import owner, random_module, sizes_of_model

    module, place = random_module(owner(family)), inputs / "models" / f"{family}-written"
    if family != owner(family):
        sizes = sizes_of_model(owner(family), find_subject(family).config, not tiny)
    else:
        sizes = replace(module.TINY, **TINY_DEPTHS.get(family, {})) if tiny else module.FULL
    if cached := has_musubi_caches(family):
        write_caches(inputs / "images", family, sizes)
    written = module.write_random_model(place, sizes=with_one_block(family, sizes) if cached and not tiny else sizes)
    files = written if isinstance(written, dict) else {family: written}
    base = owner(family)
    for part, path in files.items():
        if Path(path).is_file():
            target = model_file(inputs, family, part)
            target.parent.mkdir(parents=True, exist_ok=True)
            if part == base and cached and not tiny:
                repeat_blocks(Path(path), target, sizes)
            else:
                shutil.move(path, target)
    folders = [place / name for name in ("tokenizer", "t5_tokenizer", "tokenizer_2") if (place / name).is_dir()]
    if place / "tokenizer_2" not in folders:
        for folder in folders:
            beside = model_file(inputs, family, "text_encoder").with_name(folder.name)
            shutil.copytree(folder, beside, dirs_exist_ok=True)
        return
    for folder, name in zip(folders, (TOKENIZERS[0], TOKENIZERS[2 if "t5xxl" in files else 1]), strict=True):
        shutil.copytree(folder, inputs / "tokenizers" / name, dirs_exist_ok=True)
    if "t5xxl" in files:
        config = inputs / "tokenizers" / TOKENIZERS[2] / "tokenizer_config.json"
        config.write_text(json.dumps(T5_CONFIG), encoding="utf-8")


# ---- of families with musubi-tuner's caches

# What there is one of in the file that a full-size model is made of; the text encoder never runs.
ONE_BLOCK = ("blocks", "double_blocks", "single_blocks", "text_layers", "vision_layers")
# Their transformer has a weight for each layer of the text encoder that it reads.
READ_BY_LAYER = ("krea_2",)
FIRST_BLOCK = re.compile(r"(.*\bblocks\.|\w+_blocks\.|layers\.)0(\..*)")


def find_subject(family: str) -> Any:
    """A family, or a relative of one, as the TOML has its model."""
    from library import families
    from library.config.building import build_config
    from library.config.schema import options_of

    kind = families.config_class(families.lora_script(families.owner(family)))
    tables = tomllib.loads(VERSUS_CASES_FILE.read_text(encoding="utf-8"))
    every = tables["all"] | tables["family"][family] | tables["kind"]["lora"]
    own_values = {name: value for name, value in every.items() if name in options_of(kind)}
    return families.family_for(build_config(kind, own_values, notes=[]))


def has_musubi_caches(family: str) -> bool:
    return bool(find_subject(family).latent_cache.architecture)


def with_one_block(family: str, sizes: Any) -> Any:
    """The sizes of the file whose blocks `repeat_blocks` repeats."""
    kept = ("text_layers",) if family in READ_BY_LAYER else ()
    return replace(
        sizes, **{field.name: 1 for field in fields(sizes) if field.name in ONE_BLOCK and field.name not in kept}
    )


def repeat_blocks(small: Path, large: Path, sizes: Any) -> None:
    """A model of one block of each kind in a file -> the same with as many as `sizes` say, copied from file to file."""
    with small.open("rb") as source, large.open("wb") as target:
        size = int.from_bytes(source.read(8), "little")
        header: dict[str, Any] = json.loads(source.read(size))
        header.pop("__metadata__", None)
        new: dict[str, Any] = {}
        parts, at = [], 0
        for name, about in header.items():
            start, end = about["data_offsets"]
            match = FIRST_BLOCK.fullmatch(name)
            kind = match[1].rstrip(".").rpartition(".")[2] if match else ""
            number = getattr(sizes, kind, 0) or getattr(sizes, "blocks", 1)
            for path in [f"{match[1]}{i}{match[2]}" for i in range(number)] if match else [name]:
                new[path] = about | {"data_offsets": [at, at + end - start]}
                parts.append((start, end))
                at += end - start
        text = json.dumps(new).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        last_read: tuple[tuple[int, int], bytes] = ((0, 0), b"")
        for start, end in parts:
            if last_read[0] != (start, end):
                source.seek(8 + size + start)
                last_read = ((start, end), source.read(end - start))
            target.write(last_read[1])


def write_caches(pictures: Path, family: str, sizes: Any) -> None:
    """Random latents and captions beside each picture, of its own size, as musubi-tuner's caches. A reference image is
    the picture itself."""
    import numpy as np
    import torch
    from PIL import Image

    from library import families
    from library.data import cache_files, caches

    about = find_subject(family)
    latents, text, module = about.latent_cache, about.text_cache, families.random_module(families.owner(family))
    with torch.device("meta"):
        outputs = module.input_shapes(about, module.make_networks(sizes).denoiser()).text
    rng = np.random.default_rng(0)
    facts = {"architecture": latents.architecture, "format_version": caches.FORMAT}
    for picture in sorted(pictures.rglob("*.png")):
        width, height = Image.open(picture).size
        side = latents.square
        high, wide = height // caches.LATENT // side, width // caches.LATENT // side
        shape = (sizes.channels * side**2, *((1,) if latents.frames else ()), high, wide)
        shown = about.config.control_images.least
        size_word = f"{'' if side > 1 else '1x'}{high}x{wide}"
        names = [f"latents_{size_word}", *(f"latents_control_{number}_{size_word}" for number in range(shown))]
        file = caches.latents_file(str(picture), (width, height), latents.suffix)
        size = {"width": str(width), "height": str(height)}
        cache_files.write_cache_file(
            file, {name: rng.standard_normal(shape, np.float32) for name in names}, facts | size
        )
        caption = picture.with_suffix(".txt").read_text(encoding="utf-8").strip()
        length = len(caption)  # training reads as many tokens as the tokenizer makes of it, which are not more
        arrays = {
            text.names.get(key, key): rng.standard_normal(
                (length if text.mask else outputs[key][0], *outputs[key][1:]), np.float32
            )
            for key in text.stored
        }
        cache_files.write_cache_file(caches.text_file(str(picture), text.suffix), arrays, facts | {"caption1": caption})
