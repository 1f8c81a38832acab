"""Problems of the files of a Stable Diffusion, from headers alone."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.families import recognition
from library.families.shared import hub, part_files, scaled_weights, unet_tensors, weights
from library.families.shared.unet_checkpoint import CHANNELS, MODEL_OPTION, UnetCheckpoints, located_vae
from library.families.shared.unet_names import count_unet_blocks


def vae_files(names: Iterable[str]) -> list[str]:
    return [n for n in names if n.endswith((".safetensors", ".json")) and "/" not in n.removeprefix("vae/")]


def wanted_model(title: str) -> Message:
    return Message("an {title} .safetensors file, a diffusers folder or a Hugging Face id (owner/name)", title=title)


def find_base_model_problems(checkpoints: UnetCheckpoints, path: Path, vae: str | None) -> Iterator[Problem]:
    """Return what is wrong with a local base model; `vae` replaces its VAE, which may then be missing."""
    try:
        path = checkpoints.located(path)
        find = _find_file_problems if path.is_file() else _find_folder_problems
        yield from find(checkpoints, path, vae)
    except ConfigError as e:
        yield _said_of(MODEL_OPTION, e)


def _find_file_problems(checkpoints: UnetCheckpoints, path: Path, vae: str | None) -> Iterator[Problem]:
    other = _find_other_kind(checkpoints, path, vae) if path.suffix.lower() not in weights.PICKLED else None
    if problem := other or unet_tensors.incomplete_model(checkpoints, path, vae):
        yield Problem(MODEL_OPTION, ": {problem}", place="--", problem=problem)


def _find_folder_problems(checkpoints: UnetCheckpoints, path: Path, vae: str | None) -> Iterator[Problem]:
    title = checkpoints.facts.title
    if not (path / "unet").is_dir():
        kind = Message("not a folder of an {title} model", title=title)
        if (path / "transformer").is_dir():
            kind = Message("a folder of another kind of model")
        yield Problem(
            MODEL_OPTION,
            ": {path} is {kind} (it has no unet folder): give {wanted}",
            place="--",
            path=path,
            kind=kind,
            wanted=wanted_model(title),
        )
        return
    for part, folder in checkpoints.folders.items():
        if part == "vae" and vae:
            continue
        if not (path / folder).is_dir():
            yield Problem(
                MODEL_OPTION,
                ": {path} has no {folder} folder, so it is not a complete {title} model: download it again",
                place="--",
                path=path,
                folder=folder,
                title=title,
            )
        elif problem := _find_unreadable_weights(path / folder):
            yield Problem(MODEL_OPTION, ": {problem}", place="--", problem=problem)
            return
    yield from _find_misfits(checkpoints, path, vae)


def _find_misfits(checkpoints: UnetCheckpoints, path: Path, vae: str | None) -> Iterator[Problem]:
    """Return what the shapes of a folder's U-Net say: another model, or an incomplete one."""
    shapes = {}
    for file in weights.files(path / "unet"):
        shapes |= weights.header(file) if file.suffix == ".safetensors" else {}
    if not shapes:
        return
    if recognition.family_and_description(shapes)[0] is not checkpoints.facts:
        yield Problem(
            MODEL_OPTION,
            ": {path} is {found}, not an {title} model: choose an {title} one",
            place="--",
            path=path,
            found=recognition.describe_checkpoint(shapes),
            title=checkpoints.facts.title,
        )
    elif problem := checkpoints.misfit(path, shapes) or unet_tensors.incomplete_model(checkpoints, path, vae):
        yield Problem(MODEL_OPTION, ": {problem}", place="--", problem=problem)


def count_blocks(checkpoints: UnetCheckpoints, path: Path) -> dict[str, int]:
    """Return the number of blocks of each class in a valid model's U-Net; empty if no header contains it."""
    path = checkpoints.located(path)
    files = weights.files(path / "unet" if path.is_dir() else path)
    names = [name for file in files if file.suffix == ".safetensors" for name in weights.header(file)]
    return count_unet_blocks(names if path.is_dir() else checkpoints.single.split_parts(names)[0]["denoiser"])


def _find_other_kind(checkpoints: UnetCheckpoints, path: Path, vae: str | None) -> MessageLike | None:
    """Return why a single file, possibly a shard, is no checkpoint of this family; None if it is."""
    if problem := _find_unreadable_weights(path):
        return problem
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weights.files(path):
        shapes |= weights.header(file)
    return checkpoints.incomplete_checkpoint(path, shapes, vae)


def _find_unreadable_weights(path: Path) -> Message | None:
    """Return why the weights of a file or a model's folder cannot be read; None if they can, or may hold code."""
    if any(file.suffix.lower() in weights.PICKLED for file in weights.files(path)):
        return None
    entries = part_files.read_entries(path)
    return scaled_weights.unreadable_weights(path, entries)


def find_vae_problems(vae: str, token: str | None, title: str) -> Iterator[Problem]:
    """Return what is wrong with a VAE that replaces the base model's: a file, a folder or a Hugging Face id."""
    if problem := hub.missing_model("--vae", vae, "a VAE's .safetensors file or folder, or leave it out"):
        yield problem
        return
    if hub.is_hub_id(vae):
        yield from [p for p in [hub.unreachable_model("--vae", vae, vae_files, token)] if p]
        return
    try:
        path = located_vae(Path(vae))
        if problem := _find_unreadable_weights(path):
            yield Problem("vae", ": {problem}", place="--", problem=problem)
            return
        if path.is_file() and path.suffix.lower() not in weights.PICKLED:
            shapes = weights.header(path)
            ends = ("decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight")
            if not any(name.endswith(ends) for name in shapes):
                yield Problem(
                    "vae",
                    place="--",
                    template=": {path} is {found}: give an {title} VAE, or leave it out",
                    path=path,
                    title=title,
                    found=recognition.describe_checkpoint(shapes),
                )
                return
            inputs = (shape for name, shape in shapes.items() if name.endswith("decoder.conv_in.weight"))
            if (channels := next(inputs, (0, CHANNELS))[1]) != CHANNELS:
                yield Problem(
                    "vae",
                    place="--",
                    template=": {path} is the VAE of another model: its latents have {channels} channels, "
                    "and {title}'s have {ours}; give an {title} VAE, or leave it out",
                    path=path,
                    title=title,
                    channels=channels,
                    ours=CHANNELS,
                )
                return
        if problem := unet_tensors.lacking_vae(path):
            yield Problem("vae", place="--", template=": {problem}", problem=problem)
    except ConfigError as e:
        yield _said_of("vae", e)


def _said_of(option: str, error: ConfigError) -> Problem:
    why = error.problems[0]
    return why if why.option == option else Problem(option, ": {why}", place="--", why=why)
