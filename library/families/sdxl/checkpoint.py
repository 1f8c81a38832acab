"""SDXL's files: which are required, and their problems, from headers alone."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from library.config.problems import ConfigError, MessageLike, Problem
from library.families import recognition
from library.families.sdxl import expected_tensors, keys, model
from library.families.shared import hub, scaled_weights, weights

CHANNELS = 4  # latent channels
MODEL_OPTION = "pretrained_model_name_or_path"
WANTED = "an SDXL .safetensors file, a diffusers folder or a Hugging Face id (owner/name)"


def vae_files(names: Iterable[str]) -> list[str]:
    return [n for n in names if n.endswith((".safetensors", ".json")) and "/" not in n.removeprefix("vae/")]


def find_base_model_problems(path: Path, vae: str | None) -> Iterator[Problem]:
    """Return what is wrong with a local base model; `vae` replaces its VAE, which may then be missing."""
    try:
        if path.is_file():
            other = _whole(path, vae) if path.suffix.lower() not in weights.PICKLED else None
            if problem := other or expected_tensors.incomplete_model(path, vae):
                yield Problem(MODEL_OPTION, ": {problem}", place="--", problem=problem)
            return
        if not (path / "unet").is_dir():
            kind = "a FLUX model's folder" if (path / "transformer").is_dir() else "no folder of an SDXL model"
            yield Problem(
                MODEL_OPTION,
                ": {path} is {kind} (it has no unet folder): give {wanted}",
                place="--",
                path=path,
                kind=kind,
                wanted=WANTED,
            )
            return
        for part, folder in model.FOLDERS.items():
            if not (path / folder).is_dir() and not (part == "vae" and vae):
                yield Problem(
                    MODEL_OPTION,
                    ": {path} has no {folder} folder, so it is no complete SDXL model: download it again",
                    place="--",
                    path=path,
                    folder=folder,
                )
        shapes = {}
        for file in weights.files(path / "unet"):
            shapes |= weights.header(file) if file.suffix == ".safetensors" else {}
        if shapes and "add_embedding.linear_1.weight" not in shapes:
            yield Problem(
                MODEL_OPTION,
                ": {path} is {found}, not an SDXL model: choose an SDXL one",
                place="--",
                path=path,
                found=recognition.describe_checkpoint(shapes),
            )
        elif shapes and (problem := model.misfit(path, shapes) or expected_tensors.incomplete_model(path, vae)):
            yield Problem(MODEL_OPTION, ": {problem}", place="--", problem=problem)
    except ConfigError as e:
        yield Problem(MODEL_OPTION, ": {why}", place="--", why=e.problems[0])


def blocks_of(path: Path) -> dict[str, int]:
    """Return the number of blocks of each class in a valid model's U-Net; empty if no header contains it."""
    files = weights.files(path / "unet" if path.is_dir() else path)
    names = [name for file in files if file.suffix == ".safetensors" for name in weights.header(file)]
    return keys.count_sdxl_blocks(names if path.is_dir() else keys.split_parts(names)[0]["denoiser"])


def _whole(path: Path, vae: str | None) -> MessageLike | None:
    """Return why a single file, possibly a shard, is no SDXL checkpoint; None if it is."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weights.files(path):
        shapes |= weights.header(file)
        if problem := scaled_weights.unread_integers(file, weights.header_entries(file)):
            return problem
    return model.incomplete_checkpoint(path, shapes, vae)


def problems_of_vae(vae: str, token: str | None) -> Iterator[Problem]:
    """Return what is wrong with a VAE that replaces the base model's: a file, a folder or a Hugging Face id."""
    if problem := hub.missing_model("--vae", vae, "a VAE's .safetensors file or folder, or leave it out"):
        yield problem
        return
    if hub.is_hub_id(vae):
        yield from [p for p in [hub.unreachable_model("--vae", vae, vae_files, token)] if p]
        return
    path = Path(vae)
    try:
        if path.is_file() and path.suffix.lower() not in weights.PICKLED:
            shapes = weights.header(path)
            ends = ("decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight")
            if not any(name.endswith(ends) for name in shapes):
                yield Problem(
                    "vae",
                    place="--",
                    template=": {path} is {found}, not a VAE: give an SDXL VAE, or leave it out",
                    path=path,
                    found=recognition.describe_checkpoint(shapes),
                )
                return
            inputs = (shape for name, shape in shapes.items() if name.endswith("decoder.conv_in.weight"))
            if (channels := next(inputs, (0, CHANNELS))[1]) != CHANNELS:
                yield Problem(
                    "vae",
                    place="--",
                    template=": {path} is the VAE of another model: its latents have {channels} channels, "
                    "and SDXL's have {ours}; give an SDXL VAE, or leave it out",
                    path=path,
                    channels=channels,
                    ours=CHANNELS,
                )
                return
        if problem := expected_tensors.lacking_vae(path):
            yield Problem("vae", place="--", template=": {problem}", problem=problem)
    except ConfigError as e:
        yield Problem("vae", place="--", template=": {why}", why=e.problems[0])
