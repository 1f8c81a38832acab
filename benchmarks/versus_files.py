"""The files for all programs in versus.py: models with random weights, tokenizers, images, caches and TOML.

For families with musubi-tuner's cache format the caches are random, too, so that no program needs their text encoder,
and a full-size model repeats one random block, as drawing and holding 41 GB would take long.
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
IMAGE_SIZES = ((1024, 1024), (832, 1216), (1216, 832))  # width and height of images, equal to their buckets
TINY_SIZES = ((128, 128), (64, 256), (256, 64))
# Tiny models have the widths of the real ones, which sd-scripts hard-codes.
TINY_DEPTHS = {"sdxl": {"unet": (32, 64, 128), "depth": (0, 2, 10)}}
CAPTION_TOKENS = (90, 180)  # at least and at most
# sd-scripts' folders of tokenizers within tokenizer_cache_dir.
TOKENIZERS = ("openai_clip-vit-large-patch14", "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k", "google_t5-v1_1-xxl")
# transformers 4 cannot read these files as written by version 5.
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
    """One training for all programs."""

    family: str  # or a relative, by its name in the demo
    kind: str  # lora or full
    name: str
    options: dict[str, Any]  # TOML options, besides folders
    own: tuple[str, ...]  # the options that define the case

    @property
    def script(self) -> str:
        """Return the name of its script in sd-scripts."""
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
    """Return all cases of the file, with this number of steps each."""
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
    """Return the LoRA case of a family without memory-saving options."""
    cases = versus_cases(tiny, steps)
    return next(case for case in cases if (case.family, case.kind, case.name) == (family, "lora", "plain"))


def write_toml(case: VersusCase, folder: Path, inputs: Path) -> Path:
    return write_flat(folder / f"{case.title.replace(' ', '-')}.toml", filled(case, inputs))


def filled(case: VersusCase, inputs: Path) -> dict[str, Any]:
    """Return the options of a case with the folders of models and tokenizers filled in."""
    places = {"{models}": (inputs / "models").as_posix(), "{tokenizers}": (inputs / "tokenizers").as_posix()}
    text = json.dumps(case.options)
    for name, place in places.items():
        text = text.replace(name, place)
    return json.loads(text)


def write_flat(path: Path, options: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()), encoding="utf-8")
    return path


MUSUBI_SCRIPTS = {"krea_2_train_network": "krea2_train_network"}  # scripts with another name
# musubi-tuner's names of options. Image options are in its data set file; it lacks some of the others.
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
    """Write a case as musubi-tuner's TOML, and its data set file beside it. 8-bit weights get scales, as it
    recommends."""
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
    """Make missing models, tokenizers, images and caches."""
    from library.demo import images

    pictures = inputs / "images"
    if not pictures.exists():
        images.draw_images(pictures, sizes=(TINY_SIZES if tiny else IMAGE_SIZES) * 2)
        lengthen_captions(pictures)
    for family in sorted(families):
        if not model_file(inputs, family, family).exists():
            make_model(inputs, family, tiny)


def lengthen_captions(pictures: Path) -> None:
    """Write captions of digits, one token each, as long as those of a vision model."""
    lengths = random.Random(0)
    for caption in sorted(pictures.rglob("*.txt")):
        caption.write_text("7" * lengths.randrange(*CAPTION_TOKENS), encoding="utf-8")


def model_file(inputs: Path, family: str, part: str) -> Path:
    """Return the path of a model file in the TOML; `part` is the family's name for the base model itself."""
    from library import families

    table = tomllib.loads(VERSUS_CASES_FILE.read_text(encoding="utf-8"))["family"][family]
    option = "pretrained_model_name_or_path" if part in (family, families.owner(family)) else part
    named = next((value for value in table.values() if str(value).endswith(f"/{part}.safetensors")), "")
    place = table.get(option) or named or f"{{models}}/{part}.safetensors"
    return Path(place.format(models=inputs / "models"))


def make_model(inputs: Path, family: str, tiny: bool) -> None:
    """Make a family's model files under the names in the TOML, its tokenizers, and caches if they have musubi-tuner's
    format."""
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


# ---- families with musubi-tuner's cache format

# Numbers of blocks in the file from which a full-size model is made; the text encoder never runs.
ONE_BLOCK = ("blocks", "double_blocks", "single_blocks", "text_layers", "vision_layers")
# Their transformer has a weight per layer of the text encoder.
READ_BY_LAYER = ("krea_2",)
FIRST_BLOCK = re.compile(r"(.*\bblocks\.|\w+_blocks\.|layers\.)0(\..*)")


def find_subject(family: str) -> Any:
    """Return the subject of a family or a relative."""
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
    """Return the sizes of the file whose blocks `repeat_blocks` repeats."""
    kept = ("text_layers",) if family in READ_BY_LAYER else ()
    return replace(
        sizes, **{field.name: 1 for field in fields(sizes) if field.name in ONE_BLOCK and field.name not in kept}
    )


def repeat_blocks(small: Path, large: Path, sizes: Any) -> None:
    """Write a model with the numbers of blocks in `sizes` by repeating those of a file with one block of each kind."""
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
    """Write random latents and captions of each image's size beside it, as musubi-tuner's caches. A reference image is
    the image itself."""
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
        length = len(caption)  # training reads at most the tokens that the tokenizer makes of it
        arrays = {
            text.names.get(key, key): rng.standard_normal(
                (length if text.mask else outputs[key][0], *outputs[key][1:]), np.float32
            )
            for key in text.stored
        }
        cache_files.write_cache_file(caches.text_file(str(picture), text.suffix), arrays, facts | {"caption1": caption})
