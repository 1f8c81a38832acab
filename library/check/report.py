"""The preflight check as a report: findings by topic, what must be fixed, and how.

`kohya check`, the page's Check button and every start from the page use the same report. Loads no model.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from library import data, families
from library.check import estimate, isolated, preflight, preview_memory, preview_time, training_length
from library.compiler import checks
from library.config.building import Reading, replace_options, working_fix
from library.config.command import Launch
from library.config.environment import cpu_requested
from library.config.formats import toml_value
from library.config.json_types import JsonObject
from library.config.problems import Message, MessageLike, Problem, counted, ngettext, together
from library.config.run_config import RunConfig
from library.config.schema import options_of, section_options
from library.data import held_out
from library.data.encoding import existing, wanted_latents
from library.data.images import ImageSet
from library.files import free_space, nearest_existing, size_text
from library.measuring.candidates import saving_memory
from library.measuring.model_stats import model_stats
from library.train.step.clock import Clock

# Sections of the config -> the topic of sentences about their options.
TOPICS = {
    "model": "model",
    "data": "images",
    "captions": "captions",
    "cache": "caches",
    "network": "training",
    "embedding": "training",
    "control": "training",
    "optim": "training",
    "steps": "training",
    "noise": "training",
    "loss": "training",
    "validation": "training",
    "precision": "GPU",
    "memory": "GPU",
    "distributed": "GPU",
    "compile": "compiling",
    "save": "disk",
    "sample": "samples",
}
VERDICTS = ("bad", "hint", "ok")  # in the order of the report
ORDER = ("model", "images", "captions", "caches", "training", "GPU", "compiling", "samples", "disk", "other")
LAUNCH_OPTIONS = section_options(Launch)
NO_GPU = Message("no GPU was found: trainings run on the CPU, which is too slow for full-size models")
BYTES_PER_GIB = 2**30
MANY = 20_000  # maximum caption variants to generate for counting
ABSURD = 8  # times the available memory; no estimate is wrong by that much


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence. `verdict` is "ok", "hint" or "bad"; `fix` are values that would solve it, by option name."""

    topic: str
    verdict: str
    text: MessageLike
    fix: JsonObject = field(default_factory=dict)

    def as_json(self) -> JsonObject:
        return isolated.finding(self.text, self.topic, self.verdict, self.fix)

    @property
    def _is_idle(self) -> bool:
        return isinstance(self.text, Problem) and self.text.code == "ineffective"

    @property
    def advice(self) -> str:
        """The fix in words, to append to the text."""
        fixes = (
            f"leave {name} out" if value is None or self._is_idle else f"{name} = {toml_value(value)}"
            for name, value in self.fix.items()
        )
        return "".join(f"; fix: {fix}" for fix in fixes)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings in reading order, and what the training will need."""

    findings: tuple[Finding, ...]
    fit: estimate.MemoryEstimate | None = None
    steps: int | None = None  # optimizer steps of the training

    @property
    def problems(self) -> list[MessageLike]:
        return [finding.text for finding in self.findings if finding.verdict == "bad"]

    def as_json(self) -> JsonObject:
        """Return the report for another process."""
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "fit": self.fit.as_json() if self.fit else None,
            "steps": self.steps,
        }


def make_report(config: RunConfig, reading: Reading[Any] | None = None) -> Report:
    """Check everything that can be known before a model is loaded.

    `reading` is the result of reading this config, if that found problems or notes.
    """
    reading = reading or Reading(config, [], [])
    check = preflight.scan_images(reading)
    problems, remarks = preflight.evaluate(config, check, reading)
    problems = [*reading.problems, *problems] if reading.known else reading.problems
    gpu, memory = graphics()
    findings = [Finding(topic(problem, config), "bad", problem, working_fix(problem, config)) for problem in problems]
    notes = [note for note in [*reading.notes, *remarks] if not _repeats_one(note, problems)]
    findings += [Finding(topic(note, config), "hint", note, working_fix(note, config)) for note in notes]
    needs: estimate.MemoryEstimate | None = None
    # Counts and estimates may be impossible with contradictory values.
    with contextlib.suppress(Exception) if problems else contextlib.nullcontext():
        if not problems:
            filled, size = _with_filled_batch(config, check.images), largest_bucket(check.images, config)
            needs = estimate.estimate(filled, size, gpu, memory)
            findings += _check_memory(needs, config)
            findings += [Finding("samples", *sentence) for sentence in preview_memory.sentences(needs, config)]
            times = preview_time.sentences(needs, filled, check.images, size)
            findings += [Finding("samples", *sentence) for sentence in times]
        settled = {f.topic for f in findings if f.verdict == "bad" or f.topic == "captions"}
        findings += [
            finding for finding in _collect_findings(config, check, gpu, memory) if finding.topic not in settled
        ]
    length = None if problems else training_length.expected_length(config, check)
    findings.sort(key=lambda finding: (VERDICTS.index(finding.verdict), ORDER.index(finding.topic)))
    return Report(tuple(findings), needs, length.total if length else None)


def _repeats_one(note: Problem, problems: Sequence[Problem]) -> bool:
    """Return whether a remark asks for what a problem asks for already."""
    return bool(note.fix) and any(note.option == other.option and note.fix == other.fix for other in problems)


def topic(problem: Problem, config: RunConfig) -> str:
    """Return the topic of a problem, by its option unless the problem states it."""
    option = options_of(type(config)).get(problem.option)
    if problem.topic:
        return problem.topic
    if option:
        return TOPICS.get(option.section, "other")
    return "GPU" if problem.option in LAUNCH_OPTIONS else "other"


def graphics() -> tuple[str, float | None]:
    """Return the first GPU's name and memory in GiB; empty without one."""
    if cpu_requested() or not torch.cuda.is_available():
        return "", None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory / BYTES_PER_GIB


def largest_bucket(images: ImageSet | None, config: RunConfig) -> tuple[int, int]:
    """Return the bucket with most pixels (width, height), reference images included; without images the resolution,
    plus required reference images of that size.
    """
    sizes = {image.size_with_controls for image in images.items} if images else set()
    width, height = config.data.size or (1024, 1024)
    usual = (width, height * (1 + config.control_images.least))
    return max(sizes, key=lambda size: size[0] * size[1], default=usual)


def _with_filled_batch(config: RunConfig, images: ImageSet | None) -> RunConfig:
    """Return the config with the largest batch size that its images fill."""
    counts = [len(members) for members in images.buckets().values()] if images else []
    largest = max(counts, default=config.data.train_batch_size)
    return replace_options(config, train_batch_size=largest) if largest < config.data.train_batch_size else config


# ---- what is well


def _collect_findings(config: RunConfig, check: data.Check, gpu: str, memory: float | None) -> Iterator[Finding]:
    images, masks = check.images, check.masks
    model = model_stats(config)
    if model.counted:
        count_text = f"{model.denoiser / 1e9:.2f}B" if model.denoiser > 1e8 else f"{model.denoiser:,}"
        yield Finding(
            "model", "ok", Message("{title}: {many} parameters in the image model", title=config.title, many=count_text)
        )
    if images and images.items:
        yield Finding("images", "ok", _say_images(config, images))
        yield from _note_several_sizes(images)
        if sentence := held_out.held_out_by_folder(images):
            yield Finding("images", "ok", sentence)
        yield from _check_captions(images)
        yield from [Finding("images", "ok", masks)] if masks else []
        yield from _check_caches(config, images)
    optim = config.optim
    yield Finding(
        "training",
        "ok",
        Message(
            "{optimizer} with the schedule {schedule}",
            optimizer=optim.optimizer or "AdamW",
            schedule=optim.lr_scheduler.split(":")[0],
        ),
    )
    yield Finding("GPU", "ok", f"{gpu}, {memory:.0f} GB") if gpu and memory else Finding("GPU", "hint", NO_GPU)
    if unused := estimate.unused_memory(config, memory):
        yield Finding("GPU", "ok", unused)
    yield _check_compiling(config, bool(gpu))
    if config.save.output_dir and nearest_existing(config.save.output_dir):  # a missing drive is a problem of its own
        yield _check_disk_space(config)


def _say_images(config: RunConfig, images: ImageSet) -> Message:
    counts = data.summarise_images(images)
    clock = Clock.of(config, counts["batches_per_epoch"])
    template, steps = "{images} in {buckets}, {batches} per epoch: {steps} are {epochs} epochs", "{count} steps"
    if clock.total == 1:
        template, steps = "{images} in {buckets}, {batches} per epoch: {steps} is {epochs} epochs", "{count} step"
    return Message(
        template,
        images=counted(counts["images"], "image"),
        buckets=counted(len(counts["buckets"]), "bucket"),
        batches=ngettext("{count} batch", "{count} batches", counts["batches_per_epoch"]),
        steps=Message(steps, count=f"{clock.total:,}"),
        epochs=f"{clock.total / clock.per_epoch:,.1f}".removesuffix(".0"),
    )


def _note_several_sizes(images: ImageSet) -> Iterator[Finding]:
    """Remark that images are trained at several sizes, each a data set."""
    for sizes in dict.fromkeys(dataset.sizes for dataset in images.datasets if len(dataset.sizes) > 1):
        shown = together(str(width) if width == height else f"{width}x{height}" for width, height in sizes)
        template = "each image is trained at {count} sizes, once per repeat at each: {sizes}"
        yield Finding("images", "ok", Message(template, count=len(sizes), sizes=shown))


def _check_captions(images: ImageSet) -> Iterator[Finding]:
    empty = sum(not image.caption.strip() for image in images.items)
    if not empty:
        yield Finding("captions", "ok", "every image has a caption or the words of its folder")


def _check_caches(config: RunConfig, images: ImageSet) -> Iterator[Finding]:
    if config.cache.text:
        yield _count_encodings(config, images)
    if not config.cache.cache_latents_to_disk:
        if config.cache.latents:
            yield Finding("caches", "ok", "images are encoded once at the start, and kept in memory")
        return
    caches = wanted_latents(images.items, families.family_for(config).latent_cache).values()
    cached_count = sum(os.path.exists(existing(cache).file) for cache in caches)
    yield Finding(
        "caches",
        "ok",
        Message(
            "the latents of {there} of {count} images are already on the disk", there=cached_count, count=len(caches)
        ),
    )


def _count_encodings(config: RunConfig, images: ImageSet) -> Finding:
    """Return how many captions the text encoders read before the first step."""
    variants, learned = config.cache.cached_caption_variants, images.items
    if len(learned) * variants > MANY:
        count = f"{len(learned) * variants:,}"
        encodings = Message(
            "up to {count} encodings, {variants} variants of each caption", count=count, variants=variants
        )
        return Finding("caches", "ok", Message("captions are encoded once: {encodings}", encodings=encodings))
    held = images.validation.items if images.validation else []
    words = {caption for image in learned for caption in image.encoded_captions(variants)}
    words |= {image.encoded_caption for image in held}
    encodings = counted(len(words), "encoding")
    if variants > 1:
        encodings = Message(
            "{encodings}, up to {variants} variants of each caption", encodings=encodings, variants=variants
        )
    if "" in words:
        encodings = Message("{encodings}, with that of the empty caption", encodings=encodings)
    return Finding("caches", "ok", Message("captions are encoded once: {encodings}", encodings=encodings))


def _check_compiling(config: RunConfig, on_gpu: bool) -> Finding:
    if not config.compile.compile:
        return Finding("compiling", "ok", "torch.compile is off")
    device = torch.device("cuda" if on_gpu else "cpu")
    obstacles = list(checks.find_compile_problems(config.compile, device))
    if obstacles:  # without compile_fallback, they are reported as problems
        template = "{problem}; compile_fallback trains without it"
        return Finding("compiling", "hint", Message(template, problem=obstacles[0]))
    return Finding("compiling", "ok", Message("{backend} can compile here", backend=config.compile.compile_backend))


def _check_disk_space(config: RunConfig) -> Finding:
    free = free_space(Path(config.save.output_dir or ""))
    if not saved_size(config):  # the base model could not be read
        return Finding("disk", "ok", Message("{free} free", free=size_text(free)))
    file_size, state_interval = saved_size(config), config.save.save_state_every_n_minutes
    state = estimate.state_size(config, model_stats(config)) if state_interval else 0.0
    total_size = _count_saves(config) * file_size + 2 * state  # the new one is complete before the old one is deleted
    with_state = Message(", a state to resume from {state}", state=size_text(state)) if state_interval else ""
    template = "{free} free, one saved file takes about {each}{with_state}"
    text = Message(template, free=size_text(free), each=size_text(file_size), with_state=with_state)
    if free < file_size * 1.2:
        return Finding("disk", "bad", Message("output_dir: {text}; make room, or choose another folder", text=text))
    if free < file_size + 3 * state:  # stopping the training saves another state
        return Finding(
            "disk",
            "hint",
            Message(
                "output_dir: {text}; save_state_every_n_minutes skips states unless three of them fit: make "
                "room, or choose another folder",
                text=text,
            ),
        )
    if free < total_size:
        return Finding(
            "disk",
            "hint",
            Message(
                "output_dir: {text}, and all files of this training take about {size}; keep fewer with "
                "save_last_n_steps or save_last_n_epochs",
                text=text,
                size=size_text(total_size),
            ),
        )
    return Finding("disk", "ok", text)


def saved_size(config: RunConfig) -> float:
    """Return the approximate bytes of a saved file."""
    model = model_stats(config)
    numbers = estimate.trained_parameters(config, model)
    if not config.adapters and families.facts_of(config.family).saves_all_parts:
        numbers = model.denoiser + model.encoders + model.vae
    return numbers * estimate.saved_bytes(config)


def _count_saves(config: RunConfig) -> float:
    interval, saves = config.save.save_every_n_steps, 1.0
    if interval and not config.save.save_last_n_steps:
        steps, begin = config.steps.max_train_steps, config.save.save_from_step or 1
        saves += max(0, steps // interval - (begin - 1) // interval)
    saves += len(config.save.save_at_steps)
    return saves * (4 if config.save.save_state and not config.adapters else 1.5)


def _check_memory(needs: estimate.MemoryEstimate, config: RunConfig) -> Iterator[Finding]:
    available = needs.memory or psutil.virtual_memory().total / BYTES_PER_GIB
    if needs.peak > ABSURD * available:
        yield Finding(
            "GPU",
            "bad",
            Message(
                "{sentence}: that is far more than this machine has; lower resolution, train_batch_size or network_dim",
                sentence=needs.sentence(),
            ),
            next(saving_memory(config), {}),
        )
    elif needs.fits is False:
        yield Finding(
            "GPU",
            "hint",
            Message("{sentence}: that is more than is available", sentence=needs.sentence()),
            next(saving_memory(config), {}),
        )
    else:
        yield Finding("GPU", "ok", needs.sentence())


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Return the findings as lines for a terminal."""
    mark = {"ok": "  ok", "hint": "hint", "bad": " FIX"}
    for finding in findings:
        yield f"{mark[finding.verdict]}  {finding.topic:<10} {finding.text}{finding.advice}"
