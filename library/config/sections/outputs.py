"""What a training leaves behind: files, sample images, uploads, logs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.reading import count, count_or_off
from library.config.schema import opt

REPOSITORIES = ("model", "dataset", "space")  # that Hugging Face has


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Where the result goes, and what is kept on the way."""

    output_dir: str | None = opt(None, "The folder for the results.", kind="folder", label="Output folder")
    output_name: str | None = opt(None, "The name of the files, without an ending.")
    save_precision: Literal["float", "fp16", "bf16"] | None = opt(
        None, "The number format in the file. Empty: as trained."
    )
    save_every_n_epochs: int | None = opt(None, "Save a file every N epochs.", label="Save every N epochs", parse=count)
    save_every_n_steps: int | None = opt(None, "Save a file every N steps.", label="Save every N steps", parse=count)
    save_n_epoch_ratio: int | None = opt(
        None,
        "Save at least this many times over the whole training, at the end of epochs.",
        label="Number of saves",
        parse=count,
        advanced=True,
    )
    save_last_n_epochs: int | None = opt(
        None, "Delete files that are older than N epochs.", label="Keep last N epochs", parse=count
    )
    save_last_n_steps: int | None = opt(
        None, "Delete files that are older than N steps.", label="Keep last N steps", parse=count
    )
    save_state: bool = opt(False, "With each file, and at the end, save what is needed to resume.")
    save_state_on_train_end: bool = opt(
        False, "At the end, save what is needed to resume.", label="Save state at the end"
    )
    save_last_n_epochs_state: int | None = opt(
        None,
        "Delete states that are older than N epochs.",
        label="Keep states of last N epochs",
        parse=count,
        advanced=True,
    )
    save_last_n_steps_state: int | None = opt(
        None,
        "Delete states that are older than N steps.",
        label="Keep states of last N steps",
        parse=count,
        advanced=True,
    )

    def missing(self, run: Any) -> Iterator[str]:
        """A result needs a place."""
        if not self.output_dir:
            yield "output_dir is not set: choose a folder for the results"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSave(Save):
    """The same, for adapter files."""

    save_model_as: Literal["safetensors", "ckpt", "pt"] = opt(
        "safetensors", "The kind of file. safetensors is the one that is safe to share.", label="File format"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSave(Save):
    """The same, for whole models."""

    save_model_as: Literal["ckpt", "safetensors", "diffusers", "diffusers_safetensors"] | None = opt(
        None, "The kind of file or folder. Empty: like the base model.", label="File format"
    )
    use_safetensors: bool = opt(False, "Write safetensors where no file format is chosen.", label="Prefer safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Images drawn on the way, to see how it goes."""

    sample_prompts: str | None = opt(
        None, "The file with the prompts to draw (.txt, .toml or .json).", label="Prompt file", kind="file"
    )
    sample_every_n_epochs: int | None = opt(
        None, "Draw the prompts every N epochs.", label="Sample every N epochs", parse=count_or_off
    )
    sample_every_n_steps: int | None = opt(
        None,
        "Draw the prompts every N steps. Epochs win if both are set.",
        label="Sample every N steps",
        parse=count_or_off,
    )
    sample_at_first: bool = opt(False, "Draw the prompts once before training.")
    sample_sampler: Literal[
        "ddim",
        "pndm",
        "lms",
        "euler",
        "euler_a",
        "heun",
        "dpm_2",
        "dpm_2_a",
        "dpmsolver",
        "dpmsolver++",
        "dpmsingle",
        "k_lms",
        "k_euler",
        "k_euler_a",
        "k_dpm_2",
        "k_dpm_2_a",
    ] = opt("ddim", "The sampler that draws them.", label="Sampler")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """What the file says about itself (modelspec)."""

    metadata_title: str | None = opt(None, "The title in the file's metadata. Empty: the output name.", label="Title")
    metadata_author: str | None = opt(None, "Who made it.", label="Author")
    metadata_description: str | None = opt(None, "What it is.", label="Description", kind="text")
    metadata_license: str | None = opt(None, "The license of the file.", label="License")
    metadata_tags: str | None = opt(None, "Tags, with commas between.", label="Tags")
    metadata_trigger_phrase: str | None = opt(None, "The words that call it up.", label="Trigger phrase")
    metadata_usage_hint: str | None = opt(None, "How to use it.", label="Usage hint", advanced=True)
    metadata_thumbnail: str | None = opt(
        None, "A small picture: a file or a data URL.", label="Thumbnail", kind="file", advanced=True
    )
    metadata_merged_from: str | None = opt(None, "The models it was merged from.", label="Merged from", advanced=True)
    metadata_preprocessor: str | None = opt(None, "The preprocessor it needs.", label="Preprocessor", advanced=True)
    metadata_is_negative_embedding: str | None = opt(
        None, "true for a negative embedding.", label="Negative embedding", advanced=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Upload to Hugging Face."""

    huggingface_repo_id: str | None = opt(None, "The repository to upload to, as owner/name.", label="Repository")
    huggingface_repo_type: str | None = opt(None, "model, dataset or space.", label="Repository type", advanced=True)
    huggingface_path_in_repo: str | None = opt(None, "The folder inside the repository.", label="Path in repository")
    huggingface_token: str | None = opt(
        None,
        "The access token. Better kept in the environment as HF_TOKEN; it is never saved.",
        label="Token",
        kind="secret",
    )
    huggingface_repo_visibility: str | None = opt(
        None, "public makes the repository public. Empty: private.", label="Visibility"
    )
    save_state_to_huggingface: bool = opt(False, "Upload saved states too.", label="Upload states")
    async_upload: bool = opt(False, "Upload while the training goes on.", label="Upload in the background")

    def check(self, run: Any) -> Iterator[str]:
        """An upload needs an address."""
        if self.save_state_to_huggingface and not self.huggingface_repo_id:
            yield "save_state_to_huggingface needs huggingface_repo_id, the repository to upload to"
        if self.huggingface_repo_id and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.huggingface_repo_id):
            yield f"huggingface_repo_id must be written owner/name, got {self.huggingface_repo_id!r}"
        if self.huggingface_repo_type not in (None, *REPOSITORIES):
            yield f"huggingface_repo_type must be model, dataset or space, got {self.huggingface_repo_type!r}"
        if (self.huggingface_repo_visibility or "private").lower() not in ("public", "private"):
            yield f"huggingface_repo_visibility must be public or private, got {self.huggingface_repo_visibility!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What is written down while it trains."""

    logging_dir: str | None = opt(None, "The folder for TensorBoard logs.", kind="folder", label="Log folder")
    log_with: Literal["tensorboard", "wandb", "all"] | None = opt(
        None, "Where numbers are logged. Empty: TensorBoard, if there is a log folder."
    )
    log_prefix: str | None = opt(None, "How the name of the log's folder begins.", advanced=True)
    log_tracker_name: str | None = opt(None, "The project name in the tracker.", label="Project name", advanced=True)
    log_tracker_config: str | None = opt(
        None, "A TOML file with settings of the tracker.", label="Tracker settings", kind="file", advanced=True
    )
    log_config: bool = opt(
        False, "Log the training settings too, without paths and keys.", label="Log settings", advanced=True
    )
    wandb_run_name: str | None = opt(None, "The name of the run on Weights & Biases.", label="W&B run name")
    wandb_api_key: str | None = opt(
        None,
        "The API key. Better kept in the environment as WANDB_API_KEY; it is never saved.",
        label="W&B key",
        kind="secret",
    )
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = opt(
        None, "How much is printed. Empty: INFO.", label="Log level", advanced=True
    )
    console_log_file: str | None = opt(
        None, "Print to this file instead of the console.", label="Log file", kind="file", advanced=True
    )
    console_log_simple: bool = opt(False, "Print plain lines, without colors.", label="Simple log", advanced=True)

    def check(self, run: Any) -> Iterator[str]:
        """TensorBoard writes into a folder."""
        if self.log_with in ("tensorboard", "all") and not self.logging_dir:
            yield f"log_with = {self.log_with} needs logging_dir, the folder for the logs"
