"""The outputs of a training: files, sample images, uploads, logs."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, ClassVar, Literal

from library.config.problems import Problem
from library.config.reading import count_or_off, minutes, parse_count, switch
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.config.values import MAX_NUMBER, RESERVED, quoted

REPOSITORIES = ("model", "dataset", "space")  # kinds of repositories on Hugging Face
MAX_NAME_BYTES = 200  # maximum bytes of a name: file systems allow 255, including step, extension and temporary suffix


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The files that a training saves, at its end and in between."""

    if TYPE_CHECKING:  # a field of each kind, with the formats that it has

        @property
        def save_model_as(self) -> str | None:  # noqa: D102
            ...

    output_dir: str | None = opt(
        None, "The folder for the results: models, states and samples.", kind="folder", label="Output folder"
    )
    output_name: str | None = opt(None, "The name of the output files, without extension.")
    save_precision: Literal["float", "fp16", "bf16"] | None = opt(
        None, "fp16 or bf16 makes the file half as large as fp32. Not set: as trained."
    )
    save_every_n_epochs: int | None = opt(
        None,
        "Save a file every N epochs, to compare them and take the best.",
        label="Save every N epochs",
        parse=parse_count,
    )
    save_every_n_steps: int | None = opt(
        None,
        "Save a file every N steps, to compare them and take the best.",
        label="Save every N steps",
        parse=parse_count,
    )
    save_at_steps: tuple[int, ...] = opt(
        (),
        "Save a file at these steps too, such as 500, 800. They are not deleted.",
        label="Save at steps",
        min=1,
        ceiling=MAX_NUMBER,
        advanced=True,
    )
    save_from_step: int | None = opt(
        None,
        "Save every N steps or epochs from this step on, not before.",
        label="Save from step",
        parse=parse_count,
        advanced=True,
    )
    save_n_epoch_ratio: int | None = opt(
        None,
        "Save at least this many times over the whole training, at the end of epochs.",
        label="Number of saves",
        parse=parse_count,
        advanced=True,
    )
    save_last_n_epochs: int | None = opt(
        None,
        "Of the files that are saved after epochs, keep the last N. Empty: all.",
        label="Keep last N epoch files",
        parse=parse_count,
    )
    save_last_n_steps: int | None = opt(
        None, "Delete files that are older than N steps.", label="Keep last N steps", parse=parse_count
    )
    save_state: bool = opt(False, "Save the state with each file and at the end, to resume from. Needs disk space.")
    save_state_on_train_end: bool = opt(
        False, "Save the state at the end, to train further later.", label="Save state at the end"
    )
    save_last_n_epochs_state: int | None = opt(
        None,
        "Of the states that are saved after epochs, keep the last N.",
        label="Keep last N epoch states",
        parse=parse_count,
        advanced=True,
    )
    save_last_n_steps_state: int | None = opt(
        None,
        "Delete states that are older than N steps.",
        label="Keep states of last N steps",
        parse=parse_count,
        advanced=True,
    )
    save_state_every_n_minutes: float | None = opt(
        None,
        "Save the state every N minutes, to resume after a crash. 10 is usual.",
        label="Save state every N minutes",
        parse=minutes,
    )

    def missing(self, run: RunConfig) -> Iterator[Problem]:
        if not self.output_dir:
            yield Problem("output_dir", "is not set: choose a folder for the results")

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require distinct steps, and names that are valid on every system."""
        if duplicate_steps := sorted(step for step, times in Counter(self.save_at_steps).items() if times > 1):
            yield Problem(
                "save_at_steps",
                "names {steps} more than once: write each step once",
                steps=", ".join(map(str, duplicate_steps)),
                fix={"save_at_steps": tuple(dict.fromkeys(self.save_at_steps))},
            )
        yield from self._name_problems()

    def _name_problems(self) -> Iterator[Problem]:
        name = self.output_name
        if not name:
            return
        if PurePath(name).name != name or name == ".." or re.search(r'[<>:"|?*\\]', name):
            yield Problem(
                "output_name", 'must be a plain name without folders or any of <>:"|?*, got {name}', name=quoted(name)
            )
        elif name != name.strip(" .") or not name.isprintable() or RESERVED.fullmatch(name):
            yield Problem(
                "output_name",
                "must be a name that every system allows, got {name}; letters, numbers, - and _ are safe",
                name=quoted(name),
            )
        elif len(name.encode()) > MAX_NAME_BYTES:
            yield Problem(
                "output_name",
                "must have at most {longest} bytes, to leave room for the step and the file extension",
                longest=MAX_NAME_BYTES,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSave(Save):
    """Like `Save`, for adapter files."""

    save_model_as: Literal["safetensors", "ckpt", "pt"] = opt(
        "safetensors", "The file format. safetensors files cannot contain code.", label="File format"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSave(Save):
    """Like `Save`, for embedding files."""

    save_model_as: Literal["safetensors", "ckpt", "pt"] = opt(
        "pt", "The file format. safetensors files cannot contain code, and carry metadata.", label="File format"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSave(Save):
    """Like `Save`, for whole models."""

    only_safetensors: ClassVar[bool] = False  # whether other programs read no other format

    save_model_as: Literal["ckpt", "safetensors", "diffusers", "diffusers_safetensors"] | None = opt(
        None,
        "The format of the file or folder. Not set: the format of the base model.",
        label="File format",
        words={"diffusers": "Diffusers folder", "diffusers_safetensors": "Diffusers folder of .safetensors"},
    )
    use_safetensors: bool = opt(False, "Write safetensors where no file format is chosen.", label="Prefer safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Sample images that are generated during training."""

    sample_images: bool = opt(True, "Generate images during training, to see what it learns. Off saves a little time.")
    sample_prompts: str | None = opt(
        None, "A file with the prompts of sample images (.txt, .toml or .json).", label="Prompt file", kind="file"
    )
    sample_from_captions: int = opt(
        0,
        "Without a prompt file: sample this many captions and one new prompt. 2 is usual.",
        label="Samples from captions",
        min=0,
        max=20,
    )
    sample_every_n_epochs: int | None = opt(
        None, "Generate sample images every N epochs.", label="Sample every N epochs", parse=count_or_off
    )
    sample_every_n_steps: int | None = opt(
        None,
        "Generate sample images every N steps. 250 is usual; epochs come first if both are set.",
        label="Sample every N steps",
        parse=count_or_off,
    )
    sample_at_first: bool = opt(False, "Generate sample images once before training, to compare with.")
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
        "lcm",
    ] = opt("ddim", "The sampler of sample images; choose the one you generate images with.", label="Sampler")
    sample_compile: Literal["auto", "true", "false"] = opt(
        "auto",
        "Compile and record for samples: if it saves time (auto), always (true) or never (false).",
        parse=switch,
        label="Compile for samples",
        advanced=True,
    )

    @property
    def wanted(self) -> bool:
        return self.sample_images and bool(self.sample_prompts or self.sample_from_captions)

    @property
    def scheduled(self) -> bool:
        when = self.sample_every_n_steps or self.sample_every_n_epochs or self.sample_at_first
        return self.sample_images and bool(when)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """Metadata that is saved in the file (modelspec)."""

    metadata_title: str | None = opt(None, "The title in the file's metadata. Empty: the output name.", label="Title")
    metadata_author: str | None = opt(None, "Who made this file. It appears in the file's metadata.", label="Author")
    metadata_description: str | None = opt(
        None, "What this file does, for the file's metadata.", label="Description", kind="text"
    )
    metadata_license: str | None = opt(
        None, "The licence of this file, such as CC-BY-4.0, for the file's metadata.", label="Licence"
    )
    metadata_tags: str | None = opt(
        None, "Words that describe this file, separated by commas, for the file's metadata.", label="Tags"
    )
    metadata_trigger_phrase: str | None = opt(
        None, "The trigger word, for the metadata. It also replaces [trigger] in captions.", label="Trigger phrase"
    )
    metadata_usage_hint: str | None = opt(
        None, "How to use this file, such as a strength, for the file's metadata.", label="Usage hint", advanced=True
    )
    metadata_thumbnail: str | None = opt(
        None,
        "The thumbnail in the metadata: an image file or a data URL.",
        label="Thumbnail",
        kind="file",
        advanced=True,
    )
    metadata_merged_from: str | None = opt(
        None, "The models that this one was merged from, for the file's metadata.", label="Merged from", advanced=True
    )
    metadata_preprocessor: str | None = opt(
        None,
        "How control images are made, such as canny, for the file's metadata.",
        label="Preprocessor",
        advanced=True,
    )
    metadata_is_negative_embedding: str | None = opt(
        None, "Write true for a negative embedding.", label="Negative embedding", advanced=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Upload to Hugging Face."""

    huggingface_repo_id: str | None = opt(None, "The repository to upload to, as owner/name.", label="Repository")
    huggingface_repo_type: str | None = opt(
        None, "The kind of repository: model, dataset or space.", label="Repository type", advanced=True
    )
    huggingface_path_in_repo: str | None = opt(
        None, "The folder inside the repository. Empty: its top level.", label="Path in repository"
    )
    huggingface_token: str | None = opt(
        None,
        "The access token. Prefer the environment variable HF_TOKEN; the token is never saved.",
        label="Token",
        kind="secret",
    )
    huggingface_repo_visibility: str | None = opt(
        None, "Who sees the repository: public or private. Empty: private.", label="Visibility"
    )
    save_state_to_huggingface: bool = opt(False, "Upload saved states too.", label="Upload states")
    async_upload: bool = opt(False, "Upload in the background, during the training.", label="Upload in the background")

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require a repository for uploads."""
        if self.save_state_to_huggingface and not self.huggingface_repo_id:
            yield Problem(
                "save_state_to_huggingface",
                "needs huggingface_repo_id, the repository to upload to",
                also="huggingface_repo_id",
                fix={"save_state_to_huggingface": False},
            )
        if self.huggingface_repo_id and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.huggingface_repo_id):
            yield Problem(
                "huggingface_repo_id", "must be written owner/name, got {value}", value=quoted(self.huggingface_repo_id)
            )
        if self.huggingface_repo_type not in (None, *REPOSITORIES):
            yield Problem(
                "huggingface_repo_type",
                "must be model, dataset or space, got {value}",
                value=quoted(self.huggingface_repo_type),
            )
        if (self.huggingface_repo_visibility or "private").lower() not in ("public", "private"):
            yield Problem(
                "huggingface_repo_visibility",
                "must be public or private, got {value}",
                value=quoted(self.huggingface_repo_visibility),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Trackers and log messages of a training."""

    logging_dir: str | None = opt(
        None, "The folder for TensorBoard logs.", kind="folder", label="Log folder", written="always"
    )
    log_with: Literal["tensorboard", "wandb", "all"] | None = opt(
        None, "The tracker of the training. Not set: TensorBoard, if a log folder is set."
    )
    log_prefix: str | None = opt(None, "The prefix of the log folder's name.", advanced=True)
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
        "The API key. Prefer the environment variable WANDB_API_KEY; the key is never saved.",
        label="W&B key",
        kind="secret",
    )
    console_log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = opt(
        None, "The level of the log messages. Not set: info.", label="Log level", advanced=True
    )
    console_log_file: str | None = opt(
        None,
        "Print to this file instead of the console.",
        label="Log file",
        kind="file",
        advanced=True,
        written="always",
    )
    console_log_simple: bool = opt(False, "Print plain lines, without colours.", label="Simple log", advanced=True)

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Require a folder for TensorBoard, which writes nowhere else."""
        for option in ("log_prefix", "log_tracker_name"):  # both become parts of the log's path
            name = getattr(self, option) or ""
            if ".." in name.replace("\\", "/").split("/") or name.startswith(("/", "\\")) or ":" in name:
                yield Problem(option, "leads outside logging_dir: write a plain name", fix={option: None})
        if self.log_with in ("tensorboard", "all") and not self.logging_dir:
            yield Problem(
                "log_with",
                "= {chosen} needs logging_dir, the folder for the logs",
                chosen=self.log_with,
                also="logging_dir",
                fix={"log_with": None},
            )
