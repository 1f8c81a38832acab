"""Compare the saved files of a run: sample images, held-out loss, likeness and copies. Importing this loads torch."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from library import methods
from library.comparing import encoder as encoders
from library.comparing import losses, plan
from library.comparing.copies import TrainingLooks
from library.comparing.encoder import ImageEncoder
from library.comparing.plan import SavedFile
from library.comparing.proposal import FileScore, ProposedFile, proposed
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Report, counted
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.data import finding
from library.data.images import ImageSet
from library.families.recognition import recognise_file
from library.methods.small_files import tensor_names_of
from library.runs import layout
from library.sampling import generate
from library.sampling import plan as sampling
from library.sampling.generate import ColumnSampler, OpenModel, Sheet
from library.sampling.plan import Column
from library.sampling.prompts import Prompt

COMPARISON = "comparison.json"
PROMPTS_FROM_CAPTIONS = 4  # prompts made from captions
LOOKED_AT = 200  # training images to encode
HASHED = 2000  # training images to hash
NO_ENCODER = "Likeness to the training pictures was not measured: add --encoder dinov2 (downloaded once, 350 MB)."


@dataclass
class Comparison:
    """The results so far; lists by column, and within a row by column."""

    run: str
    folder: Path
    files: list[SavedFile]
    notes: list[Message]
    rows: list[str] = field(default_factory=list)
    pictures: list[list[str]] = field(default_factory=list)
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
        """As JSON for the page and the run's folder."""
        proposal = {"column": self.proposal.column, "reason": self.proposal.reason} if self.proposal else None
        return {
            "run": self.run,
            "folder": str(self.folder),
            "columns": [file.title for file in self.files],
            "saved": [str(file.path) for file in self.files],
            "rows": self.rows,
            "files": self.pictures,
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
        made = self.comparison
        self._measure: losses.HeldOutLoss | None = None
        if self.images is not None:
            shown, made.held_out = losses.measured_on(self.images)
            self._measure = losses.HeldOutLoss(shown, self.config)
            if not made.held_out:
                text = "The run held no images out, so the loss is that of {count} that it was trained on."
                made.notes.append(Message(text, count=counted(len(shown), "image")))
        device = self._adapters() if self.config.adapters else self._models()
        self._judge(encoder, device)
        made.grid = str(made.folder / "grid.png")
        sheet = Sheet([str(file.title) for file in made.files], made.rows, made.folder, made.pictures)
        generate.save_image(generate.side_by_side(sheet), Path(made.grid), {})
        layout.store(made.folder / COMPARISON, made.as_json())
        self.store(made)
        return made

    def _adapters(self) -> torch.device:
        """Compare files on one model."""
        config = plan.model_config(self.config)
        base = [(Path(path), weight) for path, weight in _base_weights(self.config)]
        columns = [Column(str(file.title), (*base, (file.path, 1.0))) for file in self.comparison.files]
        model = generate.open_sampling_model(config, (path for one in columns for path, _ in one.loras), self.report)
        sample = self._sampler(model, config)
        for number, column in enumerate(columns):
            self._column(number, column, model, sample, config)
            if self._measure and model.applied.changes_text:
                self._measure.forget_text()
        return model.world.device

    def _models(self) -> torch.device:
        """Compare files that are whole models."""
        device = torch.device("cpu")
        for number, file in enumerate(self.comparison.files):
            config = plan.model_config(self.config, file.path)
            model = generate.open_sampling_model(config, (), self.report)
            sample = self._sampler(model, config)
            self._column(number, Column(str(file.title), ()), model, sample, config)
            if self._measure and self.config.trains_whole_encoders:
                self._measure.forget_text()
            device = model.world.device
            del model, sample
            _free_memory(device)
        return device

    def _sampler(self, model: OpenModel, config: RunConfig) -> ColumnSampler:
        made = self.comparison
        sample = ColumnSampler(model, self.prompts, config)
        made.rows = [prompt.prompt for prompt in sample.prompts]
        made.pictures = made.pictures or [[""] * len(made.files) for _ in made.rows]
        made.copies = made.copies or [[""] * len(made.files) for _ in made.rows]
        return sample

    def _column(self, number: int, column: Column, model: OpenModel, sample: ColumnSampler, config: RunConfig) -> None:
        """Measure the loss of a file, and generate its images."""
        made, file = self.comparison, self.comparison.files[number]
        done, total = number * len(made.rows), len(made.files) * len(made.rows)
        if self._measure:
            made.losses[number] = self._measure(model, dict(column.loras), config, self.report)
            self.store(made)

        def keep(row: int, image: Image.Image) -> None:
            path = made.folder / f"{row:02d}_{number:02d}.png"
            facts = sampling.image_metadata(sample.prompts[row], column, str(file.path), model.applied.tagged)
            generate.save_image(image, path, facts)
            made.pictures[row][number] = str(path)
            self.report(Message("generating"), done + row + 1, total)
            self.store(made)

        self.report(Message("generating"), done, total)
        sample(column, keep)
        layout.store(made.folder / COMPARISON, made.as_json())  # intermediate result, in case of an interruption

    def _judge(self, encoder: ImageEncoder | None, device: torch.device) -> None:
        """Find copies, measure likeness and propose a file."""
        made = self.comparison
        _free_memory(device)
        known = [image.path for image in self.images.items if not image.is_reg] if self.images else []
        if known:
            looks = TrainingLooks(_evenly_spread(known, HASHED), self.report)
            made.copies = [[looks.nearest(path) for path in row] for row in made.pictures]
        if encoder and known:
            self._look(encoder, _evenly_spread(known, LOOKED_AT), device)
        elif not encoder:
            made.notes.append(Message(NO_ENCODER))
        measured = zip(made.files, made.losses, made.likeness, made.copied, strict=True)
        scores = [FileScore(file.title, loss, likeness, len(copied)) for file, loss, likeness, copied in measured]
        made.proposal = proposed(scores, made.held_out)

    def _look(self, encoder: ImageEncoder, training: Sequence[str], device: torch.device) -> None:
        made = self.comparison
        there = encoder.features(training, device, self.report)
        copy = encoders.threshold(there)
        for at in range(len(made.files)):
            alike = encoder.features([row[at] for row in made.pictures], device, self.report) @ there.T
            made.likeness[at] = float(alike.mean())
            for row, (value, place) in enumerate(zip(*alike.max(dim=1), strict=True)):
                if value >= copy:
                    made.copies[row][at] = made.copies[row][at] or training[int(place)]


def survey_run_images(config: RunConfig, report: Report) -> tuple[ImageSet | None, list[Message]]:
    """Return the images of a run's data set; None with an explaining note if they are no longer readable."""
    try:
        report(Message("reading the data set"), 0, 1)
        survey = finding.survey_data(config, report, keep=False)
        if survey.problems:
            raise ConfigError(*survey.problems)
        return survey.images, []
    except ConfigError as error:
        text = "Neither loss nor copies can be measured, as the data set cannot be read any more ({why})."
        return None, [Message(text, why=error.problems[0])]


def caption_prompts(images: ImageSet | None) -> list[Prompt]:
    """Return prompts from captions of the data set, as large as their images. Raises ConfigError without any."""
    own = [image for image in images.items if image.caption.strip() and not image.is_reg] if images else []
    if not own:
        raise ConfigError("there are no prompts: write --prompt TEXT or --prompts FILE")
    first = {image.encoded_caption: image for image in own}
    return [
        Prompt(caption, width=image.fit.bucket[0], height=image.fit.bucket[1])
        for caption, image in _evenly_spread([*first.items()], PROMPTS_FROM_CAPTIONS)
    ]


def sound(files: Sequence[SavedFile], config: RunConfig) -> tuple[list[SavedFile], list[Message]]:
    """Return the readable files, and a note for each other one. Raises ConfigError if none is readable."""
    kept, wrong = [], []
    for file in files:
        try:
            if file.path.is_file() and (config.adapters or file.path.suffix == ".safetensors"):
                if not tensor_names_of(file.path):
                    raise ConfigError("{path} holds no tensors", path=file.path)
            elif file.path.is_dir():
                recognise_file(file.path)
            kept.append(file)
        except ConfigError as error:
            wrong.append(error.problems[0])
    if not kept:
        raise ConfigError(*wrong)
    return kept, [Message("A file is left out ({why}).", why=problem) for problem in wrong]


def _base_weights(config: RunConfig) -> Sequence[tuple[str, float]]:
    return methods.base_weights(config) if isinstance(config, AdapterRun) else ()


def _evenly_spread(members: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items of a list, evenly spread."""
    if len(members) <= most:
        return [*members]
    return [members[at * len(members) // most] for at in range(most)]


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
