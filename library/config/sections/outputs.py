"""What a training leaves behind: files, sample images, uploads, logs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from library.config.reading import count, count_or_off
from library.config.schema import opt


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Where the result goes, and what is kept on the way."""

    output_dir: str | None = opt(None, "folder for the results", kind="folder", label="Output folder")
    output_name: str | None = opt(None, "name of the files, without ending")
    save_precision: Literal["float", "fp16", "bf16"] | None = opt(
        None, "kind of numbers in the file; as trained if not set"
    )
    save_every_n_epochs: int | None = opt(None, "save every n epochs", parse=count)
    save_every_n_steps: int | None = opt(None, "save every n steps", parse=count)
    save_n_epoch_ratio: int | None = opt(
        None, "save this many times in all, at ends of epochs", parse=count, advanced=True
    )
    save_last_n_epochs: int | None = opt(None, "keep only the files of the last n epochs", parse=count)
    save_last_n_steps: int | None = opt(None, "keep only the files of the last n steps", parse=count)
    save_state: bool = opt(False, "save what is needed to go on, with each file and at the end")
    save_state_on_train_end: bool = opt(False, "save what is needed to go on, at the end only")
    save_last_n_epochs_state: int | None = opt(
        None, "keep only the states of the last n epochs", parse=count, advanced=True
    )
    save_last_n_steps_state: int | None = opt(
        None, "keep only the states of the last n steps", parse=count, advanced=True
    )

    def missing(self, run: Any) -> Iterator[str]:
        """A result needs a place."""
        if not self.output_dir:
            yield "output_dir is not set: choose a folder for the results"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSave(Save):
    """The same, for adapter files."""

    save_model_as: Literal["safetensors", "ckpt", "pt"] = opt(
        "safetensors", "kind of file; safetensors is safe to share"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSave(Save):
    """The same, for whole models."""

    save_model_as: Literal["ckpt", "safetensors", "diffusers", "diffusers_safetensors"] | None = opt(
        None, "kind of file or folder; like the model it started from when not set"
    )
    use_safetensors: bool = opt(False, "write safetensors where save_model_as is not set")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Images drawn on the way, to see how it goes."""

    sample_prompts: str | None = opt(None, "file with prompts (.txt, .toml, .json)", kind="file")
    sample_every_n_epochs: int | None = opt(None, "draw every n epochs", parse=count_or_off)
    sample_every_n_steps: int | None = opt(None, "draw every n steps; epochs win when both are set", parse=count_or_off)
    sample_at_first: bool = opt(False, "draw once before training")
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
    ] = opt("ddim", "how SDXL draws them", label="Sampler")

    def notes(self, run: Any) -> Iterator[str]:
        """Nothing to draw."""
        wanted = self.sample_every_n_epochs or self.sample_every_n_steps or self.sample_at_first
        if wanted and not self.sample_prompts:
            yield "no sample images are drawn: sample_prompts is not set"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """What the file says about itself (modelspec)."""

    metadata_title: str | None = opt(None, "title; output_name when not set")
    metadata_author: str | None = opt(None, "who made it")
    metadata_description: str | None = opt(None, "what it is", kind="text")
    metadata_license: str | None = opt(None, "its licence")
    metadata_tags: str | None = opt(None, "tags with commas between")
    metadata_trigger_phrase: str | None = opt(None, "words that call it up")
    metadata_usage_hint: str | None = opt(None, "how to use it", advanced=True)
    metadata_thumbnail: str | None = opt(None, "small picture (file or data URL)", kind="file", advanced=True)
    metadata_merged_from: str | None = opt(None, "models it was merged from", advanced=True)
    metadata_preprocessor: str | None = opt(None, "preprocessor it needs", advanced=True)
    metadata_is_negative_embedding: str | None = opt(None, "true for a negative embedding", advanced=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Upload to Hugging Face."""

    huggingface_repo_id: str | None = opt(None, "repository to upload to, owner/name")
    huggingface_repo_type: str | None = opt(None, "kind of repository: model, dataset or space", advanced=True)
    huggingface_path_in_repo: str | None = opt(None, "folder inside the repository")
    huggingface_token: str | None = opt(
        None, "access token; better put into the environment as HF_TOKEN", kind="secret"
    )
    huggingface_repo_visibility: str | None = opt(None, "public, or private when not set")
    save_state_to_huggingface: bool = opt(False, "upload saved states too")
    async_upload: bool = opt(False, "upload while training goes on")

    def check(self, run: Any) -> Iterator[str]:
        """An upload needs an address."""
        if self.save_state_to_huggingface and not self.huggingface_repo_id:
            yield "save_state_to_huggingface needs huggingface_repo_id, the repository to upload to"


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What is written down while it trains."""

    logging_dir: str | None = opt(None, "folder for TensorBoard logs", kind="folder", label="Log folder")
    log_with: Literal["tensorboard", "wandb", "all"] | None = opt(None, "TensorBoard if not set and a folder is")
    log_prefix: str | None = opt(None, "beginning of the log's folder name", advanced=True)
    log_tracker_name: str | None = opt(None, "name of the project in the log", advanced=True)
    log_tracker_config: str | None = opt(None, "TOML with settings of the tracker", kind="file", advanced=True)
    log_config: bool = opt(False, "log the settings too, without paths and keys", advanced=True)
    wandb_run_name: str | None = opt(None, "name of the run on W&B")
    wandb_api_key: str | None = opt(None, "key of W&B; better put into the environment as WANDB_API_KEY", kind="secret")
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = opt(
        None, "how much is printed; INFO when not set", advanced=True
    )
    console_log_file: str | None = opt(None, "print to this file instead", kind="file", advanced=True)
    console_log_simple: bool = opt(False, "print plain lines without colours", advanced=True)

    def check(self, run: Any) -> Iterator[str]:
        """TensorBoard writes into a folder."""
        if self.log_with in ("tensorboard", "all") and not self.logging_dir:
            yield f"log_with = {self.log_with} needs logging_dir, the folder for the logs"
