"""What a training starts from: the model and the images."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from library.config.fixes import bucket_limits
from library.config.problems import Message, Problem, together
from library.config.reading import MAX_SIDE, parse_pair, parse_resolution, resolution, token_length
from library.config.run_config import RunConfig
from library.config.schema import opt


def resolution_rules(size: tuple[int, int], buckets: Any, place: str = "") -> Iterator[Problem]:
    """Yield problems of a resolution outside of the buckets' limits, and of limits that leave no bucket."""
    fix = {} if place else bucket_limits(buckets.sizes, buckets)  # the options of the run are not those of a file
    if buckets.min_bucket_reso < buckets.bucket_reso_steps:
        steps = buckets.bucket_reso_steps
        yield Problem(
            "min_bucket_reso",
            "must not be below bucket_reso_steps ({steps}): raise it",
            place=place,
            also="bucket_reso_steps",
            steps=steps,
        )
    if min(size) < buckets.min_bucket_reso:
        yield Problem(
            "resolution",
            "must not be below min_bucket_reso ({least}): lower min_bucket_reso",
            place=place,
            also="min_bucket_reso",
            least=buckets.min_bucket_reso,
            fix=fix,
        )
    if max(size) > buckets.max_bucket_reso:
        yield Problem(
            "resolution",
            "must not be above max_bucket_reso ({most}): raise max_bucket_reso",
            place=place,
            also="max_bucket_reso",
            most=buckets.max_bucket_reso,
            fix=fix,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The checkpoint that is trained, or that adapters are trained for."""

    pretrained_model_name_or_path: str | None = opt(
        None,
        "The model to start from: a .safetensors file, a diffusers folder or a Hugging Face id.",
        kind="file",
        label="Base model",
    )
    vae: str | None = opt(
        None, "A VAE (file or folder) to use instead of the base model's. Usually empty.", kind="file", label="VAE"
    )
    tokenizer_cache_dir: str | None = opt(
        None,
        "A folder to read tokenizers from, or keep them in. Those beside the model come first.",
        label="Tokenizer folder",
        kind="folder",
        written="if missing",
        advanced=True,
    )
    v2: bool = opt(
        False,
        "The model is Stable Diffusion 2.x, which cannot be trained here.",
        label="Stable Diffusion 2",
        advanced=True,
    )
    v_parameterization: bool = opt(
        False, "For base models that predict velocity (v-prediction) instead of noise.", label="V-prediction"
    )
    max_token_length: Literal[150, 225] | None = opt(
        None,
        "Read up to 150 or 225 caption tokens instead of 75; for captions of several sentences.",
        label="Caption length",
        parse=token_length,
    )
    clip_skip: int | None = opt(
        None, "Only written into the metadata of the file.", label="CLIP skip", min=1, advanced=True
    )
    weighted_captions: bool = opt(
        False, "Use prompt weights in captions: (word:1.3) is stronger, [word] is weaker.", advanced=True
    )
    disable_mmap_load_safetensors: bool = opt(
        False,
        "Read models without memory mapping: faster on some network drives, in WSL.",
        label="Load without memory mapping",
        advanced=True,
    )

    others: ClassVar[Mapping[str, str]] = {}  # networks that a single file of the model lacks: option -> what to choose

    @property
    def needed(self) -> Mapping[str, str]:
        return self.others  # a family leaves out those that the chosen model does not have

    @property
    def text_tokens(self) -> int | None:
        return None  # an option of some families limits the tokens; None: the family's maximum

    @property
    def float32_vae(self) -> bool | None:
        return None  # whether no_half_vae keeps the VAE in float32; None: the model has no such option

    def check(self, run: RunConfig) -> Iterator[Problem]:
        if self.v2:
            yield Problem("v2", "must be off: Stable Diffusion 2.x is not trained here")

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """Require a model, and the other networks beside a file that may be the denoiser alone."""
        base = self.pretrained_model_name_or_path or ".safetensors"
        if not self.pretrained_model_name_or_path:
            yield Problem("pretrained_model_name_or_path", "is not set: choose the model to start from")
        may_lack_parts = base.lower().endswith(".safetensors") and Path(base).parent.name != "transformer"
        for name, what in self.needed.items() if may_lack_parts else ():
            if not getattr(self, name):
                yield Problem(
                    name, "is not set: choose {what}", what=Message(what), also="pretrained_model_name_or_path"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The images: where they are, and at which sizes they are trained."""

    train_data_dir: str | None = opt(
        None,
        "A folder with images and captions, or with folders named <repeats>_<words>.",
        kind="folder",
        label="Image folder",
    )
    reg_data_dir: str | None = opt(
        None,
        "Optional: images of the class, such as other dogs, so that the model does not forget it.",
        kind="folder",
        label="Regularisation folder",
    )
    dataset_config: Path | None = opt(
        None, "A TOML or JSON file that lists several data sets. It replaces the folders above.", kind="file"
    )
    resolution: str | None = opt(
        None,
        "In pixels: the preset's, or less to be faster. Or width,height, or sizes: 512;1024.",
        parse=resolution,
    )
    train_batch_size: int = opt(
        1,
        "Images per step and GPU. 1 is fine; 2 to 4 learn more evenly, if memory allows.",
        min=1,
        ceiling=10_000,
        label="Batch size",
    )
    enable_bucket: bool = opt(
        False, "Keep each image's aspect ratio; off crops all to the resolution. Usually on.", label="Buckets"
    )
    min_bucket_reso: int = opt(
        256,
        "The shortest side of a bucket in pixels. 256 suits nearly all images.",
        label="Shortest bucket side",
        min=16,
        ceiling=MAX_SIDE,
    )
    max_bucket_reso: int = opt(
        1024,
        "The longest side of a bucket in pixels. 2048 is usual.",
        label="Longest bucket side",
        min=16,
        ceiling=MAX_SIDE,
    )
    bucket_reso_steps: int = opt(
        64,
        "Sides of buckets are multiples of this many pixels. 64 is usual; 32 crops less.",
        label="Bucket steps",
        min=1,
        ceiling=MAX_SIDE,
    )
    bucket_no_upscale: bool = opt(
        False,
        "Never enlarge images: small ones are trained in smaller buckets.",
        label="Do not upscale",
    )
    flip_aug: bool = opt(
        False, "Mirror images at random. Not for faces, text or anything with a left and right.", label="Random flip"
    )
    color_aug: bool = opt(
        False,
        "Vary hue and gamma a little. Not possible with cached latents.",
        label="Colour augmentation",
        advanced=True,
    )
    random_crop: bool = opt(
        False, "Crop at a random place instead of the centre. Not possible with cached latents.", advanced=True
    )
    face_crop_aug_range: str | None = opt(
        None,
        "Crop around faces of this relative size: min,max (2.0,4.0). Only without buckets.",
        label="Face crop range",
        parse=parse_pair,
        advanced=True,
    )
    resize_interpolation: Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area"] | None = opt(
        None,
        "How images are resized. Not set: area for shrinking, Lanczos for enlarging.",
        label="Resize method",
        advanced=True,
    )
    exif_rotation: bool = opt(
        False,
        "Turn photos as their EXIF orientation says, as viewers do. Usually on.",
        label="EXIF rotation",
        advanced=True,
    )
    transparent_background: Literal["white", "black", "gray"] | None = opt(
        None,
        "The colour behind transparent areas. Not set: the colours that the file hides there.",
        label="Background of transparent images",
        advanced=True,
    )
    masked_loss: bool = opt(False, "Train only the bright areas of the masks in conditioning_data_dir of the images.")
    alpha_mask: bool = opt(False, "Do not train the transparent areas of images. For cut-out subjects.")
    in_json: str | None = opt(
        None,
        "A metadata file (.json, .jsonl or .csv) with captions of the folder's images.",
        label="Metadata file",
        kind="file",
        advanced=True,
    )
    dataset_repeats: int = opt(
        1,
        "How often each image is seen per epoch, if the folder's name does not say it.",
        label="Repeats",
        min=1,
        ceiling=100_000,
        advanced=True,
    )
    cache_info: bool = opt(
        False,
        "Keep captions and sizes in a file: large data sets start faster.",
        label="Cache image info",
        advanced=True,
    )
    max_data_loader_n_workers: int = opt(
        8,
        "Threads that prepare batches. 0 prepares them in the training's own thread.",
        label="Data loader workers",
        advanced=True,
        min=0,
    )
    persistent_data_loader_workers: bool = opt(
        False, "Keep these threads between epochs.", label="Keep workers", advanced=True
    )
    debug_dataset: bool = opt(False, "Print the batches of the data set, without training.", advanced=True)

    @property
    def size(self) -> tuple[int, int] | None:
        return max(self.sizes, key=math.prod, default=None)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return parse_resolution(self.resolution) if self.resolution else ()

    @property
    def face_crop(self) -> tuple[float, float] | None:
        """The range of face sizes to crop for, as (least, most)."""
        if not self.face_crop_aug_range:
            return None
        low, high = self.face_crop_aug_range.split(",")
        return float(low), float(high)

    @property
    def regularisation_weight(self) -> float:
        return 1.0  # only trainings of adapters have prior_loss_weight

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Check the buckets, and which data is used."""
        if self.enable_bucket and self.bucket_reso_steps % run.grid:
            yield Problem(
                "bucket_reso_steps",
                "must be a multiple of {grid} for {title}, got {steps}",
                grid=run.grid,
                title=run.title,
                steps=self.bucket_reso_steps,
                also="enable_bucket",
                fix={"bucket_reso_steps": 64},
            )
        if self.enable_bucket and self.min_bucket_reso > self.max_bucket_reso:
            yield Problem(
                "min_bucket_reso",
                "({least}) must not be above max_bucket_reso ({most})",
                least=self.min_bucket_reso,
                most=self.max_bucket_reso,
                also="max_bucket_reso enable_bucket",
                fix=bucket_limits(self.sizes or [(1024, 1024)], self),
            )
        # With bucket_no_upscale a bucket is cut to each image's own size, and the limits of the sides do not apply.
        if self.enable_bucket and self.size and not self.bucket_no_upscale and not self.dataset_config:
            yield from dict.fromkeys(problem for size in self.sizes for problem in resolution_rules(size, self))
        if self.face_crop_aug_range and self.enable_bucket:
            yield Problem(
                "face_crop_aug_range",
                "works only without buckets: switch enable_bucket off",
                also="enable_bucket",
                fix={"enable_bucket": False},
            )
        if self.in_json and not self.train_data_dir and not self.dataset_config:
            yield Problem(
                "in_json", "needs train_data_dir, the folder its images are in", also="train_data_dir dataset_config"
            )

    def notes(self, run: RunConfig) -> Iterator[Problem]:
        """Warn of options that a dataset config replaces."""
        ignored = [name for name in ("train_data_dir", "reg_data_dir", "in_json") if getattr(self, name)]
        if self.dataset_config and ignored:
            template = "is not used: dataset_config describes the data"
            if ignored[1:]:
                template = "and {others} are not used: dataset_config describes the data"
            yield Problem(ignored[0], template, others=together(ignored[1:]), also=ignored[1:])

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        """Require images and a size."""
        if not self.train_data_dir and not self.dataset_config:
            yield Problem("train_data_dir", "is not set: choose the folder of your images", also="dataset_config")
        if not self.resolution and not self.dataset_config:
            usual = str(run.usual_size)
            template = "is not set: {usual} is usual"
            yield Problem("resolution", template, usual=usual, also="dataset_config", fix={"resolution": usual})
