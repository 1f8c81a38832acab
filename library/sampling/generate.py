"""Generate a comparison with the sampler of the trainer's sample images. Importing this loads torch."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from library import families, methods
from library.adapter_files import fitting
from library.compiler.log import CompileLog
from library.config.building import Reading
from library.config.problems import ConfigError, Message, Problem, Report, collecting, raise_if_any
from library.config.run_config import RunConfig
from library.data import pixels
from library.distributed.world import World
from library.downloads import hub_files
from library.families.base import Family, ModelComponents, SampleRequest
from library.families.shared import file_identity
from library.families.shared.vae_memory import is_out_of_memory
from library.families.shared.weights import header_entries
from library.files import blocking_path
from library.memory.placement import plan_placement
from library.memory.prepare import prepare_denoiser, prepare_encoders
from library.memory.quantization import fp8_storage
from library.methods import base_weights
from library.methods.applied_controls import is_control
from library.methods.applied_files import AppliedFiles
from library.sampling import few_steps, plan, prompt_checks
from library.sampling.batching import BatchSizer, in_batches
from library.sampling.engine import ImageEngine, images_left
from library.sampling.feature_cache import FeatureCache, block_chain
from library.sampling.plan import Column
from library.sampling.prompts import Prompt, seeds_of, with_defaults, with_used_images
from library.sampling.requests import imageless_request, request_of
from library.sampling.sheet import Sheet, save_image, side_by_side

logger = logging.getLogger(__name__)
AS_SEEN = pixels.Decoding(upright=True)  # decode control images of prompts as viewers and diffusers do
REPLACED = (
    "{path} was replaced or changed while images were generated, so they show the model as it was before; generate "
    "them again for the new file"
)
DECODED = {"tiles": "in tiles", "CPU": "on the CPU, which is slow"}


@dataclass(frozen=True)
class OpenModel:
    """A model that is ready to sample, and its applicable files."""

    family: Family
    world: World
    components: ModelComponents
    applied: AppliedFiles
    merged: plan.Weighted = ()  # files of base_weights, with their strengths

    @property
    def named_in_prompts(self) -> set[Path]:
        """The LoRA files that it shows, which other programs name in prompts."""
        return {*self.applied.tagged, *(path for path, _ in self.merged)}

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with torch.no_grad(), self.world.autocast():
            yield

    @contextlib.contextmanager
    def encoders_on_device(self) -> Iterator[None]:
        """Move the text encoders to the device within this context."""
        try:
            for encoder in self.components.encoders.values():
                encoder.to(self.world.device)
            yield
        finally:
            for encoder in self.components.encoders.values():
                encoder.to("cpu")


def open_sampling_model(config: RunConfig, files: Iterable[Path], report: Report, word: str = "") -> OpenModel:
    """Load a config's model with its base_weights merged and with adapter files, which start switched off, and prepare
    it to sample.

    `check_before` reports problems of the config. `word` is the prompt word of embeddings without one. Raises
    ConfigError for files that do not fit.
    """
    family = families.family_for(config)
    report(Message("loading the model"), 0, 1)
    world = World(config)
    components = family.load(world.storage_dtype, world.compute_dtype, deferring=True)
    file_identity.note_files(*components.deferred_files)
    base_weights.merge_when_read(components, family, config)
    fp8_storage.store_when_read(components, config)
    components.read_denoiser(plan_placement(family, config, world.device))
    components.read_vae()
    components.read_encoders()
    for network in (components.denoiser, components.vae, *components.encoders.values()):
        if network is not None:
            network.requires_grad_(False).eval()
    base_weights.merge_into_model(components, family, config)
    applied = AppliedFiles(components, family, word)
    for path in dict.fromkeys((*files, *few_steps.sample_lora(config))):
        applied.add(path)
    file_identity.check_watched_files()  # everything was read from the same files
    prepare_encoders(components.encoders, {}, config)
    prepare_denoiser(components.denoiser, family, config, world.device, ())
    return OpenModel(family, world, components, applied, base_weights.files_with_strengths(config))


class ColumnSampler:
    """Generates the images of one column after another with the same prompts and seeds."""

    def __init__(
        self,
        model: OpenModel,
        prompts: Sequence[Prompt],
        config: RunConfig,
        columns: int = 1,
        before_pass: Callable[[], object] = lambda: None,
    ) -> None:
        """`columns` is the number of columns to come; `before_pass` is called before each pass of the denoiser."""
        defaults = few_steps.prompt_defaults(config, model.family.sample_defaults)
        multiple = model.family.sample_multiple
        self._sizer = BatchSizer(config.sample.sample_batch_size, model.world.device)
        self._model, self._sampler = model, model.family.sampler(model.components)
        self._cache = FeatureCache(self._sampler.denoiser, block_chain(model.family), config.sample.sample_cache)
        self._is_ready, self._decoded_by, self._few_steps = False, "", few_steps.sample_lora(config)
        self._columns, self._before_pass, self._changes = columns, before_pass, 0
        denoiser, family, device = model.components.denoiser, model.family, model.world.device
        self._engine = ImageEngine(denoiser, family, config, device, CompileLog())
        self._decoding = replace(AS_SEEN, ground=config.data.transparent_background or "")
        self.prompts = [with_defaults(prompt, defaults, multiple) for prompt in _usable_prompts(prompts, config)]

    def __call__(self, column: Column, keep: Callable[[int, Image.Image], None]) -> None:
        """Apply the column's files and pass each image to `keep`, with the number of its prompt."""
        model = self._model
        with model.computing(), self._applied(column):
            left = images_left(self.prompts, self._sampler, self._columns)
            self._columns -= 1
            if not self._is_ready or model.applied.changes_text:  # else the encoded prompts of the last column serve
                self._sampler, self._is_ready = model.family.sampler(model.components), True
                with model.encoders_on_device():
                    self._sampler.remember(self._requested(prompt) for prompt in self.prompts)
            with (
                self._sampler.vae_on(model.world.device),
                self._engine.running(left, self._before_pass, records=not self._cache.is_on),
            ):
                requests = [(row, self._requested(prompt)) for row, prompt in enumerate(self.prompts)]
                for row, image in in_batches(self._sampler, requests, self._sizer, self._images):
                    if isinstance(image, Exception):
                        raise _explained(image, requests[row][1])
                    keep(row, image)
                    self._log_shortage()
        self._cache.log_savings()

    def _images(self, requests: Sequence[SampleRequest]) -> list[Image.Image]:
        return self._engine.images(self._sampler, requests, lambda: self._cache.draw(self._sampler, requests))

    @contextlib.contextmanager
    def _applied(self, column: Column) -> Iterator[None]:
        """Apply the column's files; those of sample_lora only within this context."""
        applied = self._model.applied
        applied.set(dict(self.with_few_steps(column).loras))
        if applied.number_of_changes != self._changes:
            self._changes = applied.number_of_changes
            self._engine.recorder.free()  # recordings compute with the files of the last column
        try:
            yield
        finally:
            applied.set(dict(column.loras))

    def _requested(self, prompt: Prompt) -> SampleRequest:
        """Return the sampler's request: words of embeddings become their tokens, and the control image is read."""
        request, guide = request_of(prompt, self._decoding), prompt.controlnet_image
        with_tokens = self._model.applied.words.with_tokens
        return replace(
            request,
            prompt=with_tokens(request.prompt),
            negative=with_tokens(request.negative),
            guide=Image.fromarray(pixels.read_pixels(guide, self._decoding)) if guide else None,
        )

    def with_all_shown(self, column: Column) -> Column:
        """Return the column with all files that its images show."""
        column = self.with_few_steps(column)
        return replace(column, loras=(*self._model.merged, *column.loras))

    def metadata(self, row: int, column: Column, base: str) -> dict[str, str]:
        """Return the texts in the file of an image of `base`: what it takes to generate it again."""
        prompt = self.prompts[row]
        steps = self._sampler.count_steps(imageless_request(prompt))
        shown, tagged = self.with_all_shown(column), self._model.named_in_prompts
        return plan.image_metadata(prompt, steps, shown, base, tagged)

    def with_few_steps(self, column: Column) -> Column:
        """Return the column with the LoRA of sample_lora."""
        strengths = dict(column.loras)
        for path, strength in self._few_steps.items():
            strengths[path] = strengths.get(path, 0.0) + strength
        return replace(column, loras=tuple(strengths.items()))

    def close(self) -> None:
        self._engine.close()

    def _log_shortage(self) -> None:
        """Log once how images are decoded when memory is short."""
        by = self._sampler.decoded_by
        if by and by != self._decoded_by:
            logger.warning("memory is too short to decode an image at once, so images are decoded %s", DECODED[by])
        self._decoded_by = by or self._decoded_by


def _explained(error: Exception, request: SampleRequest) -> Exception:
    """Return the error of an image, as a sentence if it lacks memory."""
    if not is_out_of_memory(error):
        return error
    template = "Not enough memory for an image of {width}x{height}: generate smaller ones, or swap blocks"
    return ConfigError(template, width=request.width, height=request.height)


@contextlib.contextmanager
def refusing_replaced_files() -> Iterator[None]:
    """Raise ConfigError if model files are replaced within this context, while they are read or at the end."""
    with file_identity.watching() as files:
        yield
    if path := files.changed():
        raise ConfigError(REPLACED, path=path)


@refusing_replaced_files()
def generate(  # noqa: PLR0913 - the inputs of a comparison, and two callbacks
    config: RunConfig,
    columns: Sequence[Column],
    prompts: Sequence[Prompt],
    folder: Path,
    report: Report,
    store: Callable[[Sheet], None] = lambda sheet: None,
    word: str = "",
) -> Sheet:
    """Generate each prompt in each column, column by column, into a new folder in `folder`. Calls `store` after each
    image; `word` is the prompt word of embeddings without one. Raises ConfigError for files that do not fit the model,
    or are replaced meanwhile.
    """
    files = [path for column in columns for path, _ in column.loras]
    raise_if_any([*_unusable_folder(folder), *find_problems(config, prompts, files)])
    config = hub_files.with_local_lora(config, "sample_lora", hub_files.find_or_download(report))
    config = hub_files.with_local_base_weights(config, hub_files.find_or_download(report))
    raise_if_any(_unusable_files(config, _files_of_config(config)))
    model = open_sampling_model(config, files, report, word)
    _check_guides(prompts, bool(model.applied.controls))
    done, total = 0, 0

    def report_progress() -> None:
        report(Message("generating"), done, total)

    sample = ColumnSampler(model, prompts, config, len(columns), report_progress)
    total = len(columns) * len(sample.prompts)
    new_folder = folder / time.strftime("%Y%m%d-%H%M%S")
    sheet = Sheet([column.title for column in columns], [prompt.prompt for prompt in sample.prompts], new_folder)
    sheet.files, sheet.seeds = [[""] * len(columns) for _ in sample.prompts], seeds_of(sample.prompts)
    base = str(config.model.pretrained_model_name_or_path)
    for at, column in enumerate(columns):

        def keep(row: int, image: Image.Image, at: int = at, column: Column = column) -> None:
            nonlocal done
            path = new_folder / f"{row:02d}_{at:02d}.png"
            save_image(image, path, sample.metadata(row, column, base))
            done += 1
            sheet.files[row][at] = str(path)
            store(sheet)

        sample(column, keep)
    sample.close()
    sheet.grid = str(new_folder / "grid.png")
    save_image(side_by_side(sheet), Path(sheet.grid), sample.metadata(0, columns[0], base))
    store(sheet)
    return sheet


def check_before(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    raise_if_any(find_problems(config, prompts))


def find_problems(config: RunConfig, prompts: Sequence[Prompt], files: Iterable[Path] = ()) -> Iterator[Problem]:
    """Yield unreadable images of prompts, adapter files that are missing, damaged or of another family, and why a model
    cannot be loaded with this config.
    """
    yield from families.family_for(config).problems()
    yield from _unreadable(config, prompts)
    yield from few_steps.setting_problems(config)
    yield from methods.find_method_problems(config)
    of_samples = (path for path in _files_of_config(config) if path.is_file())  # others may be downloaded
    yield from _unusable_files(config, (*files, *of_samples))


def find_further_problems(
    reading: Reading[Any] | None, prompts: Sequence[Prompt], files: Iterable[Path], folder: Path
) -> Iterator[Problem]:
    """Yield the problems beside those that were found in the words of a command; `reading` is None without a model."""
    yield from _unusable_folder(folder)
    if reading is None:
        yield from _missing_files(files)
        return
    problems: list[Problem] = []
    # What a contradictory config causes elsewhere is found again once it is mended.
    with collecting(problems), contextlib.suppress(*[Exception] * bool(reading.problems)):
        problems += find_problems(reading.config, prompts, files)
    yield from (problem for problem in problems if reading.wrong.isdisjoint(problem.options))


def _files_of_config(config: RunConfig) -> list[Path]:
    return [*few_steps.sample_lora(config), *(path for path, _ in base_weights.files_with_strengths(config))]


def _usable_prompts(prompts: Sequence[Prompt], config: RunConfig) -> list[Prompt]:
    """Return the prompts with one seed and without images that the model does not use."""
    seeded = plan.with_one_seed(prompts)
    # Images of loaded control adapters are used whatever the model reads.
    return [
        replace(with_used_images(prompt, config.control_images), controlnet_image=prompt.controlnet_image)
        for prompt in seeded
    ]


def _unreadable(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield images of prompts that the model would use but that are missing or damaged."""
    for path, why in prompt_checks.broken_images(prompts, config.control_images, pixels.check_file):
        if why:
            yield Problem("", pixels.UNREADABLE_IMAGE, path=path, reason=why)
        else:
            yield Problem("", "{path} does not exist", path=path)


def _check_guides(prompts: Sequence[Prompt], follows: bool) -> None:
    """Raise ConfigError if a control image is missing, or no file follows it."""
    for prompt in prompts:
        guide = prompt.controlnet_image
        if follows and not guide:
            raise ConfigError("a LLLite file follows a control image: choose one, in a prompt file with --cn edges.png")
        if guide and not follows:
            raise ConfigError(
                "{image} is a control image, which only LLLite follows: add its file, or leave --cn out", image=guide
            )
        if guide and not Path(guide).is_file():
            raise ConfigError("{path} does not exist", path=guide)


def _unusable_folder(folder: Path) -> Iterator[Problem]:
    if blocking := blocking_path(folder):
        yield Problem("", "{folder} cannot be written to; choose another folder", folder=blocking)


def _missing_files(paths: Iterable[Path]) -> Iterator[Problem]:
    """Yield each path once that is no file."""
    for path in dict.fromkeys(paths):
        if not path.is_file():
            yield Problem("", "{path} does not exist", path=path)


def _unusable_files(config: RunConfig, paths: Iterable[Path]) -> Iterator[Problem]:
    """Yield files that are missing, damaged, no adapters or of another family, by their headers.

    Other formats than safetensors have no header and are only looked for.
    """
    for path in dict.fromkeys(paths):
        yield from _missing_files([path])
        if path.is_file() and path.suffix == ".safetensors":
            try:
                stored = header_entries(path)
            except ConfigError as e:
                yield from e.problems
                continue
            why = None if is_control({*stored}) else fitting.misfit(path, stored, config.family)
            if why:
                yield Problem("", "{problem}", problem=why)
