"""Compare the saved files of a run: sample images, held-out loss, likeness and copies. Importing this loads torch."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image

from library import methods
from library.comparing import encoder as encoders
from library.comparing import losses, plan
from library.comparing.encoder import ImageEncoder
from library.comparing.plan import SavedFile
from library.comparing.proposal import FileScore, ProposedFile, propose_file
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Report, counted, raise_if_any
from library.config.run_config import ControlUse, RunConfig
from library.curation.similar_images import NEAR, looks
from library.data import finding
from library.data.images import ImageSet
from library.families.recognition import recognise_file
from library.methods.small_files import tensor_names_of
from library.runs import layout
from library.sampling import generate
from library.sampling.caption_prompts import evenly_spread, shown_from, with_images
from library.sampling.generate import ColumnSampler, OpenModel
from library.sampling.plan import Column
from library.sampling.prompts import Prompt, seeds_of
from library.sampling.sheet import Sheet, save_image, side_by_side

COMPARISON = "comparison.json"
PROMPTS_FROM_CAPTIONS = 4  # prompts made from captions
MAX_ENCODED_IMAGES = 200  # training images to encode
MAX_HASHED_IMAGES = 2000  # training images to hash
NO_ENCODER = (
    "Likeness to the training images was not measured: choose an image encoder, such as DINOv2 (Likeness on the page, "
    "--encoder dinov2 in a shell; downloaded once, 350 MB)."
)


@dataclass
class Comparison:
    """The results so far; lists by column, and within a row by column."""

    run: str
    folder: Path
    files: list[SavedFile]
    notes: list[Message]
    rows: list[str] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)  # of the rows
    samples: list[list[str]] = field(default_factory=list)  # paths
    copies: list[list[str]] = field(default_factory=list)  # the training image that a sample nearly copies, or ""
    losses: list[float | None] = field(init=False)
    held_out: bool = False
    likeness: list[float | None] = field(init=False)
    proposal: ProposedFile | None = None
    grid: str = ""

    def __post_init__(self) -> None:
        nothing: list[float | None] = [None for _ in self.files]
        self.losses, self.likeness = [*nothing], [*nothing]

    @property
    def copied(self) -> list[set[str]]:
        return [{row[at] for row in self.copies} - {""} for at in range(len(self.files))]

    def as_json(self) -> JsonObject:
        """Return the comparison for the page and the file in the run's folder."""
        proposal = {"column": self.proposal.column, "reason": self.proposal.reason} if self.proposal else None
        return {
            "run": self.run,
            "folder": str(self.folder),
            "columns": [file.title for file in self.files],
            "saved": [str(file.path) for file in self.files],
            "rows": self.rows,
            "seeds": self.seeds,
            "files": self.samples,
            "copies": self.copies,
            "losses": self.losses,
            "held_out": self.held_out,
            "likeness": self.likeness,
            "proposal": proposal,
            "notes": self.notes,
            "grid": self.grid,
        }


@dataclass
class FileComparer:
    """The comparison of one run. `images` are those of its data set, None if that is no longer readable."""

    config: RunConfig  # of the training
    images: ImageSet | None
    prompts: list[Prompt]
    comparison: Comparison
    report: Report
    store: Callable[[Comparison], None]

    def __call__(self, encoder: ImageEncoder | None) -> Comparison:
        """Compare everything, file by file."""
        comparison = self.comparison
        self._measure: losses.HeldOutLoss | None = None
        if self.images is not None:
            measured_images, comparison.held_out = losses.choose_measured_images(self.images)
            self._measure = losses.HeldOutLoss(measured_images, self.config)
            if not comparison.held_out:
                text = "The run held no images out, so the loss is that of {count} that it was trained on."
                comparison.notes.append(Message(text, count=counted(len(measured_images), "image")))
        device = self._adapters() if self.config.adapters else self._models()
        self._judge(encoder, device)
        comparison.grid = str(comparison.folder / "grid.png")
        sheet = Sheet(
            [str(file.title) for file in comparison.files], comparison.rows, comparison.folder, comparison.samples
        )
        save_image(side_by_side(sheet), Path(comparison.grid), {})
        layout.store(comparison.folder / COMPARISON, comparison.as_json())
        self.store(comparison)
        return comparison

    def _adapters(self) -> torch.device:
        """Compare files on one model."""
        config = plan.model_config(self.config)
        columns = [
            Column(str(file.title), () if file.is_base else ((file.path, 1.0),)) for file in self.comparison.files
        ]
        files = [*(path for column in columns for path, _ in column.loras), *methods.assistant_lora(self.config)]
        model = generate.open_sampling_model(config, files, self.report)
        sample = self._sampler(model, config, len(columns))
        for number, column in enumerate(columns):
            self._column(number, column, model, sample, config)
            if self._measure and model.applied.changes_text:
                self._measure.forget_text()
        sample.close()
        return model.world.device

    def _models(self) -> torch.device:
        """Compare files that are whole models."""
        device = torch.device("cpu")
        for number, file in enumerate(self.comparison.files):
            config = plan.model_config(self.config, None if file.is_base else file.path)
            model = generate.open_sampling_model(config, (), self.report)
            sample = self._sampler(model, config)
            self._column(number, Column(str(file.title), ()), model, sample, config)
            if self._measure and self.config.trains_whole_encoders:
                self._measure.forget_text()
            device = model.world.device
            sample.close()
            del model, sample  # before the next model is opened
            _free_memory(device)
        return device

    def _sampler(self, model: OpenModel, config: RunConfig, columns: int = 1) -> ColumnSampler:
        comparison = self.comparison
        sample = ColumnSampler(model, self.prompts, config, columns)
        comparison.rows = [prompt.prompt for prompt in sample.prompts]
        comparison.seeds = seeds_of(sample.prompts)
        comparison.samples = comparison.samples or [[""] * len(comparison.files) for _ in comparison.rows]
        comparison.copies = comparison.copies or [[""] * len(comparison.files) for _ in comparison.rows]
        return sample

    def _column(self, number: int, column: Column, model: OpenModel, sample: ColumnSampler, config: RunConfig) -> None:
        """Measure the loss of a file, and generate its images."""
        comparison, file = self.comparison, self.comparison.files[number]
        done, total = number * len(comparison.rows), len(comparison.files) * len(comparison.rows)
        if self._measure:
            in_steps = dict(column.loras) | methods.assistant_lora(self.config)
            comparison.losses[number] = self._measure(model, in_steps, config, self.report)
            self.store(comparison)

        def keep(row: int, image: Image.Image) -> None:
            path = comparison.folder / f"{row:02d}_{number:02d}.png"
            save_image(image, path, sample.metadata(row, column, str(file.path)))
            comparison.samples[row][number] = str(path)
            self.report(Message("generating"), done + row + 1, total)
            self.store(comparison)

        self.report(Message("generating"), done, total)
        sample(column, keep)
        # An intermediate result, in case of an interruption.
        layout.store(comparison.folder / COMPARISON, comparison.as_json())

    def _judge(self, encoder: ImageEncoder | None, device: torch.device) -> None:
        """Find copies, measure likeness and propose a file."""
        comparison = self.comparison
        _free_memory(device)
        training_paths = [image.path for image in self.images.items if not image.is_reg] if self.images else []
        if training_paths:
            looks = TrainingLooks(evenly_spread(training_paths, MAX_HASHED_IMAGES), self.report)
            comparison.copies = [[looks.nearest(path) for path in row] for row in comparison.samples]
        if encoder and training_paths:
            self._look(encoder, evenly_spread(training_paths, MAX_ENCODED_IMAGES), device)
        elif not encoder:
            comparison.notes.append(Message(NO_ENCODER))
        measured = zip(comparison.files, comparison.losses, comparison.likeness, comparison.copied, strict=True)
        scores = [
            FileScore(file.title, loss, likeness, len(copied), file.is_base)
            for file, loss, likeness, copied in measured
        ]
        comparison.proposal = propose_file(scores, comparison.held_out)

    def _look(self, encoder: ImageEncoder, training: Sequence[str], device: torch.device) -> None:
        comparison = self.comparison
        training_features = encoder.features(training, device, self.report)
        copy_threshold = encoders.threshold(training_features)
        for at in range(len(comparison.files)):
            sample_features = encoder.features([row[at] for row in comparison.samples], device, self.report)
            alike = sample_features @ training_features.T  # cosine similarities, as features have unit length
            comparison.likeness[at] = float(alike.mean())
            for row, (value, nearest) in enumerate(zip(*alike.max(dim=1), strict=True)):
                if value >= copy_threshold:
                    comparison.copies[row][at] = comparison.copies[row][at] or training[int(nearest)]


def survey_run_images(config: RunConfig, report: Report) -> tuple[ImageSet | None, list[Message]]:
    """Return the images of a run's data set; None with an explaining note if they are no longer readable."""
    try:
        report(Message("reading the data set"), 0, 1)
        survey = finding.survey_data(config, report, keep=False)
        raise_if_any(survey.problems)
        return survey.images, []
    except ConfigError as error:
        text = "Neither loss nor copies can be measured, as the data set cannot be read any more ({why})."
        return None, [Message(text, why=error.problems[0])]


def caption_prompts(images: ImageSet | None, use: ControlUse) -> list[Prompt]:
    """Return prompts from captions of the data set, as large as their images, and with the images that the model is
    shown. Raises ConfigError without any."""
    shown = shown_from(images, use) if images else []
    captioned = [image for image in shown if image.caption.strip()]
    if not captioned:
        raise ConfigError("there are no prompts: write --prompt TEXT or --prompts FILE")
    by_caption = {image.encoded_caption: image for image in captioned}
    return [
        with_images(Prompt(caption, width=image.fit.bucket[0], height=image.fit.bucket[1]), image, use)
        for caption, image in evenly_spread([*by_caption.items()], PROMPTS_FROM_CAPTIONS)
    ]


def readable_files(files: Sequence[SavedFile], config: RunConfig) -> tuple[list[SavedFile], list[Message]]:
    """Return the readable files, and a note for each other one. Raises ConfigError if none is readable."""
    readable, wrong = [], []
    for file in files:
        try:
            if file.path.is_file() and (config.adapters or file.path.suffix == ".safetensors"):
                if not tensor_names_of(file.path):
                    raise ConfigError("{path} holds no tensors", path=file.path)
            elif file.path.is_dir():
                recognise_file(file.path)
            readable.append(file)
        except ConfigError as error:
            wrong.append(error.problems[0])
    if not readable:
        raise ConfigError(*wrong)
    return readable, [Message("A file is left out ({why}).", why=problem) for problem in wrong]


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class TrainingLooks:
    """The hashes of training images."""

    def __init__(self, paths: Sequence[str], report: Report) -> None:
        """Skips unreadable images and images too plain to distinguish."""
        self._known: list[tuple[str, tuple[int, int]]] = []
        for number, path in enumerate(paths):
            report(Message("reading the training images"), number, len(paths))
            if (hashes := looks(path)) is not None:
                self._known.append((path, hashes))

    def nearest(self, sample: str) -> str:
        """Return the training image that this image nearly copies, "" if none."""
        sample_hashes = looks(sample)
        if sample_hashes is None:
            return ""
        distances = [(_distance(sample_hashes, other), path) for path, other in self._known]
        bits, path = min(distances, default=(NEAR + 1, ""))
        return path if bits <= NEAR else ""


def _distance(first: tuple[int, int], second: tuple[int, int]) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(first, second, strict=True))  # the number of different bits
