"""What a training starts from: the model, the images, their captions, and what is encoded once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from library.config.reading import count, extension, pair, positive_pair, resolution, token_length
from library.config.schema import opt


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The checkpoint that is trained, or that adapters are trained for."""

    pretrained_model_name_or_path: str | None = opt(
        None,
        "the base model: a .safetensors file, a diffusers folder, or a Hugging Face id",
        kind="file",
        label="Base model",
    )
    vae: str | None = opt(None, "another VAE (file or folder) instead of the model's own", kind="file", label="VAE")
    tokenizer_cache_dir: str | None = opt(
        None, "folder with saved tokenizers, so that nothing is downloaded", kind="folder", advanced=True
    )
    v2: bool = opt(False, "the model is Stable Diffusion 2.x, which is not trained here", advanced=True)
    v_parameterization: bool = opt(False, "the model predicts velocity instead of noise", label="V-prediction")
    max_token_length: Literal[150, 225] | None = opt(
        None, "how many caption tokens are read; 75 when not set", parse=token_length
    )
    clip_skip: int | None = opt(None, "written into the file's metadata only", min=1, advanced=True)
    weighted_captions: bool = opt(False, "captions may weigh words: (word:1.3), [word]", advanced=True)
    disable_mmap_load_safetensors: bool = opt(
        False, "read model files at once instead of mapping them; quicker on some network drives", advanced=True
    )

    def check(self, run: Any) -> Iterator[str]:
        """SD 2.x has no trainer here."""
        if self.v2:
            yield "v2 must be off: Stable Diffusion 2.x is not trained here, only SDXL and FLUX.1"

    def missing(self, run: Any) -> Iterator[str]:
        """A training needs a model."""
        if not self.pretrained_model_name_or_path:
            yield "pretrained_model_name_or_path is not set: choose the model to start from"


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The images: where they are, and at which sizes they are trained."""

    train_data_dir: str | None = opt(
        None, "folder that holds folders named <repeats>_<words>, each with images", kind="folder", label="Image folder"
    )
    reg_data_dir: str | None = opt(
        None, "the same for regularisation images", kind="folder", label="Regularisation folder"
    )
    dataset_config: Path | None = opt(
        None, "TOML or JSON that describes the data in detail; replaces the folders above", kind="file"
    )
    resolution: str | None = opt(
        None, "size to train at: 1024, or width,height; with buckets only its area counts", parse=resolution
    )
    train_batch_size: int = opt(1, "images per step and GPU", min=1, label="Batch size")
    enable_bucket: bool = opt(False, "keep each image's shape: images of like shape are trained together")
    min_bucket_reso: int = opt(256, "shortest side of a bucket in pixels", min=64)
    max_bucket_reso: int = opt(1024, "longest side of a bucket in pixels; 2048 suits SDXL and FLUX.1", min=64)
    bucket_reso_steps: int = opt(64, "sides of buckets are multiples of this many pixels", min=1)
    bucket_no_upscale: bool = opt(False, "never enlarge an image: small ones get a bucket of their own size")
    flip_aug: bool = opt(False, "mirror images at random; not for faces, text or anything with a left and a right")
    color_aug: bool = opt(False, "vary hue and gamma a little; not with cached latents", advanced=True)
    random_crop: bool = opt(False, "crop at random instead of in the middle; not with cached latents", advanced=True)
    face_crop_aug_range: str | None = opt(
        None, "crop around faces, face size min,max as a share (2.0,4.0); not with buckets", parse=pair, advanced=True
    )
    resize_interpolation: Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area"] | None = opt(
        None, "how images are resized; area when shrinking and lanczos when enlarging if not set", advanced=True
    )
    masked_loss: bool = opt(False, "learn only where the mask image of the dataset config is bright")
    alpha_mask: bool = opt(False, "use the transparency of images as mask")
    in_json: str | None = opt(
        None,
        "metadata file (.json, .jsonl) with captions, for fine-tuning on train_data_dir",
        kind="file",
        advanced=True,
    )
    dataset_repeats: int = opt(1, "how often each image of the metadata file is seen per epoch", min=1, advanced=True)
    cache_info: bool = opt(False, "remember captions and sizes in metadata_cache.json; starts sooner", advanced=True)
    max_data_loader_n_workers: int = opt(8, "processes that prepare batches; 0 uses the training process", min=0)
    persistent_data_loader_workers: bool = opt(False, "keep these processes between epochs")
    debug_dataset: bool = opt(False, "go through the data and show it, without training", advanced=True)

    @property
    def size(self) -> tuple[int, int] | None:
        """The resolution as (width, height) in pixels."""
        return positive_pair(self.resolution) if self.resolution else None

    @property
    def face_crop(self) -> tuple[float, float] | None:
        """The range of face sizes to crop for, as (least, most)."""
        if not self.face_crop_aug_range:
            return None
        low, high = self.face_crop_aug_range.split(",")
        return float(low), float(high)

    def check(self, run: Any) -> Iterator[str]:
        """Rules about buckets and about which data is meant."""
        if self.enable_bucket and self.bucket_reso_steps % run.grid:
            yield f"bucket_reso_steps must be a multiple of {run.grid} for {run.title}, got {self.bucket_reso_steps}"
        if self.enable_bucket and self.min_bucket_reso > self.max_bucket_reso:
            yield f"min_bucket_reso ({self.min_bucket_reso}) must not be above max_bucket_reso ({self.max_bucket_reso})"
        if self.face_crop_aug_range and self.enable_bucket:
            yield "face_crop_aug_range works without buckets only: switch enable_bucket off"
        if self.in_json and not self.train_data_dir and not self.dataset_config:
            yield "in_json needs train_data_dir, the folder its images are in"

    def notes(self, run: Any) -> Iterator[str]:
        """What a dataset config replaces."""
        ignored = [name for name in ("train_data_dir", "reg_data_dir", "in_json") if getattr(self, name)]
        if self.dataset_config and ignored:
            yield f"{' and '.join(ignored)} not used: dataset_config describes the data"

    def missing(self, run: Any) -> Iterator[str]:
        """A training needs images and a size."""
        if not self.train_data_dir and not self.dataset_config:
            yield "train_data_dir is not set: choose the folder that holds your folders of images"
        if not self.resolution and not self.dataset_config:
            yield "resolution is not set: 1024 suits SDXL and FLUX.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Captions:
    """The words that go with the images, and how they vary from epoch to epoch."""

    caption_extension: str = opt(".caption", "ending of caption files; most people use .txt", parse=extension)
    shuffle_caption: bool = opt(False, "shuffle the tags of a caption each time it is used")
    keep_tokens: int = opt(0, "this many tags stay in front, neither shuffled nor dropped", min=0)
    caption_dropout_rate: float = opt(0.0, "share of images that are trained without caption", min=0.0, max=1.0)
    caption_dropout_every_n_epochs: int = opt(0, "leave all captions out in every n-th epoch; 0 never", min=0)
    caption_tag_dropout_rate: float = opt(0.0, "share of tags that are left out", min=0.0, max=1.0)
    caption_prefix: str | None = opt(None, "text in front of every caption, such as a trigger word")
    caption_suffix: str | None = opt(None, "text after every caption")
    enable_wildcard: bool = opt(False, "{a|b} in a caption picks one; of several lines one is used")
    caption_separator: str = opt(",", "what separates tags", advanced=True)
    keep_tokens_separator: str = opt("", "tags before this sign stay in front (such as |||)", advanced=True)
    secondary_separator: str | None = opt(None, "joins tags that are shuffled and dropped as one", advanced=True)
    token_warmup_min: int = opt(1, "tags to start with when tags are added step by step", min=0, advanced=True)
    token_warmup_step: float = opt(
        0.0, "step at which all tags are there; below 1 a share of the training", min=0.0, advanced=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """What is encoded once, before training, instead of in every step."""

    cache_latents: bool = opt(False, "encode all images once; faster, and the VAE leaves the GPU")
    cache_latents_to_disk: bool = opt(False, "keep the encoded images beside the images for the next run")
    cache_text_encoder_outputs: bool = opt(False, "encode all captions once; the text encoders leave the GPU")
    cache_text_encoder_outputs_to_disk: bool = opt(False, "keep the encoded captions for the next run")
    vae_batch_size: int = opt(1, "images encoded at once", min=1)
    skip_cache_check: bool = opt(False, "trust what is on disk without looking into it", advanced=True)

    @property
    def latents(self) -> bool:
        """Whether images are encoded once: to disk means in any case."""
        return self.cache_latents or self.cache_latents_to_disk

    @property
    def text(self) -> bool:
        """Whether captions are encoded once: to disk means in any case."""
        return self.cache_text_encoder_outputs or self.cache_text_encoder_outputs_to_disk

    def check(self, run: Any) -> Iterator[str]:
        """What changes from epoch to epoch cannot be encoded once."""
        if self.latents:
            for name in ("color_aug", "random_crop"):
                if getattr(run.data, name):
                    yield f"{name} cannot be used with cache_latents: switch one of them off"
        if self.text:
            for name in ("shuffle_caption", "caption_dropout_rate", "caption_tag_dropout_rate", "token_warmup_step"):
                if getattr(run.captions, name):
                    yield f"{name} cannot be used with cache_text_encoder_outputs: switch one of them off"

    def notes(self, run: Any) -> Iterator[str]:
        """What a cached caption freezes without being wrong."""
        if self.text and run.captions.caption_dropout_every_n_epochs:
            yield "caption_dropout_every_n_epochs has no effect with cache_text_encoder_outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextBatchCache(Cache):
    """The same, where captions are encoded in batches of their own size."""

    text_encoder_batch_size: int | None = opt(
        None, "captions encoded at once; the batch size when not set", parse=count
    )
