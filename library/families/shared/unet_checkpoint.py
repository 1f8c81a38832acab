"""Open the checkpoints of a Stable Diffusion, single files and diffusers folders, as networks."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Message, either
from library.families import recognition
from library.families.base import WeightPlacement
from library.families.facts import FamilyFacts, Shapes
from library.families.shared import autoencoder, chosen_file, clip, transfer, unet, weights
from library.families.shared.chosen_file import Wanted
from library.families.shared.single_file import SingleFile
from library.families.shared.unet_names import Layout
from library.families.shared.weights import Source

CHANNELS = 4  # of latents
MODEL_OPTION = "pretrained_model_name_or_path"
VAE_FILE = Wanted(
    "vae", "a VAE of Stable Diffusion", ("a VAE",), (autoencoder.VAE_MARKER,), ("vae.safetensors",), CHANNELS
)


@dataclass(frozen=True)
class TextEncoderFiles:
    """One text encoder of a model, in its files."""

    folder: str  # in a diffusers folder
    blame: str  # its name in messages
    build: Callable[[Mapping[str, Tensor]], nn.Module]  # from tensors by diffusers name
    tensors: Callable[[Shapes], list[str]]  # plain names, possibly incomplete -> all names of a complete one


@dataclass
class OpenCheckpoint:
    """An open checkpoint: readers for the tensors of each part, and leftover data for export."""

    path: Path
    unet: dict[str, Source]  # diffusers name -> tensor
    shapes: dict[str, tuple[int, ...]]  # of the U-Net's tensors
    parts: dict[str, Callable[[], dict[str, Tensor]]]  # the other parts -> their tensors by diffusers name
    unassigned: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class UnetCheckpoints:
    """The checkpoints of a family: their files, words for them, and their networks."""

    facts: FamilyFacts
    single: SingleFile
    whole: str  # the description by `recognise` of a complete single file
    alone: str  # the description of a U-Net without text encoders
    gigabytes: str  # of a complete file in half precision
    encoders: Mapping[str, TextEncoderFiles]
    scale: float  # factor from VAE samples to latents
    heads: int | None = None  # of the U-Net's attention; None for heads of 64 channels
    added: bool = False  # whether its U-Nets are conditioned on sizes and a pooled text

    @property
    def folders(self) -> dict[str, str]:
        """The folder of each part in a diffusers folder."""
        encoders = {part: encoder.folder for part, encoder in self.encoders.items()}
        return {"denoiser": "unet", "vae": "vae", **encoders}

    @property
    def blame(self) -> dict[str, str]:
        """Parts by the names that error messages use."""
        return {"denoiser": "U-Net", "vae": "VAE", **{part: files.blame for part, files in self.encoders.items()}}

    def wanted_files(self, names: Iterable[str], half: bool) -> list[str]:
        """Return the files of a repository to download: each part's weights once (fp16 if `half`), configs,
        tokenizers.
        """
        names = list(names)
        out = [name for name in names if name.startswith(("tokenizer/", "tokenizer_2/", "scheduler/"))]
        for folder in self.folders.values():
            weight_files = [name for name in names if name.startswith(f"{folder}/") and name.endswith(".safetensors")]
            weight_files = [name for name in weight_files if "openvino" not in name and "non_ema" not in name]
            fp16_files = [name for name in weight_files if ".fp16" in name]
            out += (
                fp16_files
                if half and fp16_files
                else [name for name in weight_files if name not in fp16_files] or fp16_files
            )
            out += [name for name in names if name.startswith(f"{folder}/") and name.endswith(".json")]
        return [*out, *(["model_index.json"] if "model_index.json" in names else [])]

    def located(self, path: Path) -> Path:
        """Return the model of a path: in a folder that is none of diffusers', the single file that fits.

        Raises ConfigError if several fit, or none of several does.
        """
        if not path.is_dir() or (path / "model_index.json").is_file() or any(map(Path.is_dir, self._places(path))):
            return path
        wanted = Wanted(MODEL_OPTION, self.whole, (self.whole,))
        candidates = chosen_file.checkpoints(path)
        chosen = chosen_file.choose(path, wanted, candidates)
        if chosen is None and len(candidates) > 1:
            raise chosen_file.none_fits(path, wanted)
        return chosen or path

    def _places(self, path: Path) -> list[Path]:
        return [path / folder for folder in (*self.folders.values(), "transformer")]

    def open(self, path: Path, half: bool, mmap: bool, vae: str | None = None) -> OpenCheckpoint:
        """Open a single file or a diffusers folder. Raises ConfigError if a part is missing or foreign; the VAE may be
        missing if `vae` is another one.
        """
        return self._open_folder(path, half, mmap) if path.is_dir() else self._open_single_file(path, mmap, vae)

    def _open_single_file(self, path: Path, mmap: bool, vae: str | None) -> OpenCheckpoint:
        file = weights.open_weights(path, mmap)
        parts, unassigned = self.single.split_parts(file)
        shapes = file.shapes()
        if problem := self.incomplete_checkpoint(path, shapes, vae):
            raise ConfigError(problem)

        def read(part: str) -> dict[str, Tensor]:
            return self.single.to_diffusers(part, {short: file[name] for short, name in parts[part].items()})

        named = self.single.to_diffusers("denoiser", parts["denoiser"])
        return OpenCheckpoint(
            path,
            {name: file.source(stored) for name, stored in named.items()},
            {name: shapes[stored] for name, stored in named.items()},
            {part: functools.partial(read, part) for part, names in parts.items() if names and part != "denoiser"},
            {plain: file[name] for plain, name in unassigned.items()},
        )

    def _open_folder(self, path: Path, half: bool, mmap: bool) -> OpenCheckpoint:
        folders = self.folders

        def read(part: str) -> weights.Weights:
            return weights.Weights(weights.files(path / folders[part], "fp16" if half else None), mmap)

        def tensors(part: str) -> dict[str, Tensor]:
            return canonical_tensors(part, dict(read(part)))

        denoiser = read("denoiser")
        parts = [part for part in folders if part != "denoiser" and (path / folders[part]).is_dir()]
        readers = {part: functools.partial(tensors, part) for part in parts}
        return OpenCheckpoint(path, {name: denoiser.source(name) for name in denoiser}, denoiser.shapes(), readers)

    def incomplete_checkpoint(self, path: Path, shapes: Shapes, vae: str | None = None) -> Message | None:
        """Return why a single file is not the expected checkpoint, with the fix; None if it is."""
        title = self.facts.title
        parts, _ = self.single.split_parts(shapes)
        family, description = recognition.family_and_description(shapes)
        if description == "a LoRA file":
            return Message(
                "{path} is a LoRA file, not a model: give it as --network_weights, and an {title} checkpoint here",
                path=path,
                title=title,
            )
        if family and family is not self.facts:
            return Message(
                "{path} is {found}: train it with {scripts}, or choose an {title} checkpoint",
                path=path,
                found=description,
                scripts=either(family.scripts),
                title=title,
            )
        if description == self.alone:
            return Message(
                "{path} has no text encoders: give a complete {title} checkpoint, or the diffusers folder it came from",
                path=path,
                title=title,
            )
        if description != self.whole:
            return Message(
                "{path} is {found}, not an {title} checkpoint: choose an {title} one (about {gigabytes} GB in half "
                "precision)",
                path=path,
                found=description,
                title=title,
                gigabytes=self.gigabytes,
            )
        for part, names in parts.items():
            if not names and not (part == "vae" and vae):
                fix = Message("choose a complete {title} checkpoint", title=title)
                fix = Message("give a VAE with --vae") if part == "vae" else fix
                return Message("{path} holds no {blame}: {advice}", path=path, blame=self.blame[part], advice=fix)
        return self.misfit(path, {short: shapes[name] for short, name in parts["denoiser"].items()})

    def misfit(self, path: Path, shapes: Shapes) -> Message | None:
        """Return why a U-Net with the family's names is no plain one: more channels, or a distilled tree."""
        named = self.single.to_diffusers("denoiser", shapes)
        channels = named.get("conv_in.weight", (0, 4))[1]
        if channels != 4:
            return Message(
                "{path} takes {channels} channels instead of 4, as models for inpainting, editing or depth do, and "
                "is not trained here: choose a base model",
                path=path,
                channels=channels,
            )
        block_depths = list(unet.depths(named))
        levels = len(Layout.of(named).attention)
        for level in range(levels):
            depths_of_level = {
                n for block, n in block_depths if block in (f"down_blocks.{level}", f"up_blocks.{levels - 1 - level}")
            }
            if len(depths_of_level) > 1:
                return Message(
                    "{path} has a distilled U-Net (SSD-1B or the like), which is not trained here: choose a full "
                    "{title}",
                    path=path,
                    title=self.facts.title,
                )
        return None

    def open_unet(
        self, stored: OpenCheckpoint, dtype: torch.dtype, keep_fp8: bool = False
    ) -> tuple[nn.Module, Callable[[WeightPlacement | None], object]]:
        """Return the U-Net of a checkpoint without its weights, and its reader for `dtype`.

        With `keep_fp8` 8-bit matrices of its blocks stay 8-bit.
        """
        with self._blamed(stored, "denoiser"):
            denoiser = self.empty_unet(stored.shapes)
            transfer.expect(denoiser, stored.shapes)
        in_blocks = (lambda name: ".transformer_blocks." in name or ".resnets." in name) if keep_fp8 else None
        return denoiser, functools.partial(
            transfer.fill_weights, denoiser, stored.unet, transfer.widened(dtype, in_blocks)
        )

    def empty_unet(self, shapes: Shapes) -> nn.Module:
        return unet.empty_unet(shapes, self.heads)

    def build(self, part: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Build a network from tensors by diffusers name, which determine its sizes."""
        if part == "denoiser":
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            return weights.assign(self.empty_unet(shapes), tensors)
        if part == "vae":
            return autoencoder.build_autoencoder(tensors, self.scale)
        return self.encoders[part].build(tensors)

    def build_network(self, stored: OpenCheckpoint, part: str, dtype: torch.dtype) -> nn.Module:
        """Build another network of a checkpoint than its U-Net on the CPU."""
        with self._blamed(stored, part):
            tensors = stored.parts[part]() if part in stored.parts else {}
            return self.build(part, {name: weights.cast_floating(tensor, dtype) for name, tensor in tensors.items()})

    @contextlib.contextmanager
    def _blamed(self, stored: OpenCheckpoint, part: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, KeyError, StopIteration, ZeroDivisionError) as e:
            raise ConfigError(
                "{path}: its {blame} is not that of an {title} model ({short})",
                path=stored.path,
                blame=self.blame[part],
                title=self.facts.title,
                short=_short(e),
            ) from e


def canonical_tensors(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a diffusers folder under our names, whichever version of diffusers or transformers wrote it."""
    if part == "vae":
        return autoencoder.vae_to_diffusers(tensors)
    return {
        clip.canonical_clip_path(name): tensor for name, tensor in tensors.items() if not name.endswith("position_ids")
    }


def located_vae(path: Path) -> Path:
    """Return the VAE of --vae: a file, the folder of a VAE or a whole model, or in a folder of several files the one
    that fits. Raises ConfigError if several fit, or none of several does.
    """
    inner = path / "vae"
    return chosen_file.inside(inner if inner.is_dir() else path, VAE_FILE) if path.is_dir() else path


def read_vae(path: Path, half: bool, mmap: bool) -> dict[str, Tensor]:
    """Read the VAE of --vae: a file in either layout, with or without a prefix, a VAE's folder, or a whole model's."""
    file = weights.Weights(weights.files(located_vae(path), "fp16" if half else None), mmap)
    if not any(name.endswith(autoencoder.VAE_MARKER) for name in file):
        raise recognition.wrong_kind_error(path, "a VAE")
    return autoencoder.vae_to_diffusers(file)


def _short(error: Exception) -> str:
    """Return the second line of an error, which has the facts, or else the first; its class if there is neither."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[min(1, len(lines) - 1)][:160]
