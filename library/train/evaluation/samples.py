"""Sample images during training, from the same prompts and seeds each time, so that they can be compared."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from library.compiler.plan import CompilePlan
from library.config import phases
from library.config.problems import ConfigError, Message, MessageLike
from library.config.run_config import RunConfig
from library.config.sections.sampling import OFF
from library.data import pixels
from library.data.images import ImageSet
from library.distributed.world import World
from library.families.base import Family, ModelComponents, SampleRequest
from library.families.shared.vae_memory import is_out_of_memory
from library.files import UnwritableError, clear_errors
from library.memory.prepare import is_sharded
from library.methods.sample_lora import SampleLora
from library.runs.record import error_sentence
from library.sampling import caption_prompts, few_steps, plan, prompts
from library.sampling.batching import BatchSizer, in_batches
from library.sampling.engine import ImageEngine, ImagesLeft, images_left
from library.sampling.feature_cache import FeatureCache, block_chain
from library.sampling.prompts import Prompt
from library.sampling.requests import imageless_request, request_of
from library.sampling.sheet import save_image
from library.train import beside
from library.train.evaluation.sample_changes import SampleChanges
from library.train.evaluation.validation import cancel_check, in_evaluation_mode, without_learning
from library.train.journal import Journal
from library.train.step.clock import Clock
from library.train.step.loss import live_encoders
from library.train.stop_requests import WorkCancelled
from library.train.training import Training

NOT_LISTED = "sample_prompts: the samples of this step are not listed ({why}); the training continues"
NOT_ENCODED = "sample_prompts: the prompts could not be encoded ({why}); that is tried again when samples are due"
LONGEST_NAME = 60  # characters of a prompt in a warning
Failures = list[tuple[str | None, MessageLike]]  # prompts, and why each has no sample; None: all of a step
DECODED = {
    "tiles": "sample_prompts: memory is too short to decode a sample at once, so samples are decoded in tiles",
    "CPU": "sample_prompts: the GPU lacks the memory to decode samples, so they are decoded on the CPU, which is slow",
}


# Own graphs and own generators leave those of the training unchanged.
# Why: docs/decisions/2026-11-28-one-engine-for-pictures.md
class SampleRunner:
    """Generates the images of the prompt file when due, and reads the file again after changes.

    The training's random numbers and compiled graphs do not change: every image has its own generator, and compiled
    blocks have graphs apart while sampling.
    """

    _engine: ImageEngine  # from `use_prepared` on

    def __init__(self, family: Family, components: ModelComponents, config: RunConfig, images: ImageSet) -> None:
        self._components, self._config = components, config
        sample = config.sample
        self.wanted = sample.wanted  # the user may request samples at any time
        self._prompts: list[Prompt] = []
        self._seeded: list[Prompt] = []  # the same, each with a seed, for the samples being generated
        self._decoded_by = ""
        self._sizer: BatchSizer | None = None
        self._changes = SampleChanges()
        self._all_encoded = False  # whether all prompts are encoded, so that freed text encoders are not needed
        if not self.wanted:
            return
        self._sampler = family.sampler(components)
        self._file = Path(sample.sample_prompts) if sample.sample_prompts else None
        # Processes with shards of one model must run the same blocks.
        threshold = OFF if is_sharded(config) else sample.sample_cache
        self._cache = FeatureCache(self._sampler.denoiser, block_chain(family), threshold)
        self._lora = SampleLora(few_steps.sample_lora(config), family)
        self._model_defaults = family.sample_defaults
        self._defaults = few_steps.prompt_defaults(config, self._model_defaults)
        self._multiple = family.sample_multiple
        self._seen = self._stamp()
        self._prompts = self._read(self._file) if self._file else self._of_captions(images)

    def use_prepared(self, family: Family, device: torch.device, plan: CompilePlan) -> None:
        if self.wanted:
            self._engine = ImageEngine(self._components.denoiser, family, self._config, device, plan.log, plan)

    def _of_captions(self, images: ImageSet) -> list[Prompt]:
        from_captions = caption_prompts.prompts_from(images, self._config)
        defaults = few_steps.prompt_defaults(self._config, caption_prompts.with_few_steps(self._model_defaults))
        return [prompts.with_defaults(prompt, defaults, self._multiple) for prompt in from_captions]

    def _stamp(self) -> tuple[int, int] | None:
        if not self._file:
            return None
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def _read(self, file: Path) -> list[Prompt]:
        file_prompts = prompts.read_prompts(file)
        file_prompts = [prompts.with_used_images(prompt, self._config.control_images) for prompt in file_prompts]
        return [prompts.with_defaults(prompt, self._defaults, self._multiple) for prompt in file_prompts]

    def encode_prompts(self, world: World, journal: Journal) -> None:
        """Encode the prompts while the text encoders are loaded; cached text lets them be freed before the first step.

        A failure is a warning, and encoding is tried again when samples are due.
        """
        if not (self.wanted and self._config.cache.text):
            return
        journal.phase(phases.ENCODING_PROMPTS)
        encoders = self._components.encoders.values()
        try:
            for encoder in encoders:
                encoder.to(world.device)
            self._remember()
        except WorkCancelled:
            raise
        except Exception as error:
            why = beside.describe_failure(error, self._config, journal.doing)
            for encoder in encoders:
                encoder.to("cpu")
            journal.warn(Message(NOT_ENCODED, why=why))

    def _remember(self) -> None:
        """Encode the remaining prompts with the loaded text encoders, or with ones read again to the CPU."""
        self._all_encoded, requests = False, self._requests()
        if self._sampler.unknown(requests):
            absent = self._components.read_again.keys() - self._components.encoders.keys()
            loaded = {name: self._components.read_again[name].read() for name in sorted(absent)}
            self._components.encoders |= loaded
            try:
                with self._lora.applied(self._components):  # it may adapt the text encoders, too
                    self._sampler.remember(requests)
            finally:
                for name in loaded:
                    del self._components.encoders[name]
        self._all_encoded = len(requests) == len(self._prompts)

    def _requests(self) -> list[SampleRequest]:
        """Return a request for each prompt with readable images; generating the others reports the reason."""
        requests = []
        for prompt in self._prompts:
            with contextlib.suppress(ConfigError):
                requests.append(request_of(prompt, pixels.decoding(self._config)))
        return requests

    def _read_as(self, text: str) -> str:
        return self._config.caption_change.of_prompt(text)

    def at_first(self, training: Training) -> None:
        if self.wanted and self._config.sample.sample_at_first and not training.clock.step:
            self._sample_all(training)

    def when_due(self, training: Training) -> None:
        """Generate samples after a step: at the end of an epoch, every n steps, or on request.

        Epochs win if both are set, as upstream. Scheduled samples are also generated after the last step, so that
        there are images of the finished file.
        """
        sample = self._config.sample
        steps = None if sample.sample_every_n_epochs else sample.sample_every_n_steps
        due = any(training.clock.every(steps, sample.sample_every_n_epochs))
        due = due or (training.clock.done and sample.scheduled)
        if (training.journal.requests.granted("sample") or due) and self.wanted:
            self._sample_all(training)

    def _sample_all(self, training: Training) -> None:
        training.step_log.settle()
        began = time.monotonic()
        changed = self._reread(training.world, training.journal)
        self._seeded = self._with_seeds(self._prompts if changed is None else changed, training.world)
        paths: dict[int, Path] = {}
        failures: Failures = []
        try:
            self._use(changed, training.journal)
            training.journal.phase(phases.GENERATING_SAMPLES, 0, len(self._prompts))
            self._generate(training, paths, failures)
        except WorkCancelled:
            training.journal.say("Some samples were not generated, as the training is ending.")
        except Exception as error:  # the prompts or the networks could not be prepared
            failures.append((None, beside.reason(error, training)))
        beside.attempt(lambda: self._note_shortage(training.journal), NOT_LISTED, training)
        reports = training.world.gather((paths, failures))
        beside.attempt(lambda: self._tell(reports, training), NOT_LISTED, training)
        beside.attempt(lambda: self._judge(reports, training), NOT_LISTED, training)
        if images := sum(len(paths_of_rank) for paths_of_rank, _ in reports):
            seconds = time.monotonic() - began
            beside.attempt(
                lambda: training.journal.previewed(training.clock.step, images, seconds), NOT_LISTED, training
            )

    def _with_seeds(self, written: list[Prompt], world: World) -> list[Prompt]:
        """Return the prompts with a new seed where none is written, the same in all processes."""
        seeded = prompts.with_drawn_seeds(written)
        return seeded if seeded == written else world.gather(seeded)[0]

    def _generate(self, training: Training, paths: dict[int, Path], failures: Failures) -> None:
        """Generate this process' share of the images, with the VAE on the device for all of them."""
        world, device = training.world, training.world.device
        vae: Any = self._components.vae  # kept if samples are generated
        networks = [self._components.denoiser, vae, *self._components.encoders.values()]
        # Processes with shards of one model generate each image together.
        own = [
            numbered
            for numbered in enumerate(self._seeded)
            if training.method.shards or numbered[0] % world.ranks == world.rank
        ]
        self._sampler.live = live_encoders(self._components, training.method, cached=True)
        left = self._images_left([prompt for _, prompt in own], training.clock)
        with (
            self._vae_on(device),
            without_learning(networks, training),
            training.method.assistant.off(),
            self._lora.applied(self._components),
            self._engine.running(left, cancel_check(training), records=not self._cache.is_on),
        ):
            # Samplers may run the first blocks by themselves, with the factors of the last step's weights otherwise.
            training.method.prepare_factors()
            requests: list[tuple[int, SampleRequest]] = []
            for number, prompt in own:
                with self._failing_alone(prompt.prompt, training, failures):  # a missing image
                    requests.append((number, self._request(prompt)))
            # Free memory may differ between processes that must agree on batches.
            sizer = BatchSizer(1, device) if training.method.shards else self._sizer_of(device)
            images = in_batches(self._sampler, requests, sizer, self._images, (WorkCancelled,))
            for done, (number, image) in enumerate(images, start=1):
                # such as a lack of memory, a broken VAE or a full disk
                with self._failing_alone(self._prompts[number].prompt, training, failures):
                    if isinstance(image, Exception):
                        raise image
                    self._keep(number, image, training, paths)
                training.journal.phase(
                    phases.GENERATING_SAMPLES, min(done * world.ranks, len(self._prompts)), len(self._prompts)
                )
        self._cache.log_savings()
        # Recordings compute with the files of sample_lora, and the optimizer may not have allocated its states yet.
        if training.clock.step and not self._lora:
            self._engine.recorder.free_if_short()
        else:
            self._engine.recorder.free()

    def _images_left(self, own_prompts: Sequence[Prompt], clock: Clock) -> ImagesLeft:
        """Return the scheduled images of these prompts until the end of the training."""
        sample = self._config.sample
        left = clock.times_left(sample.sample_every_n_steps, sample.sample_every_n_epochs) if sample.scheduled else 0
        return images_left(own_prompts, self._sampler, rounds=1 + left)

    @contextlib.contextmanager
    def _failing_alone(self, prompt: str, training: Training, failures: Failures) -> Iterator[None]:
        """Note an error within this context as the failure of one prompt's sample."""
        try:
            yield
        except WorkCancelled:
            raise
        except Exception as error:
            failures.append((prompt, beside.reason(error, training)))

    def _sizer_of(self, device: torch.device) -> BatchSizer:
        self._sizer = self._sizer or BatchSizer(self._config.sample.sample_batch_size, device)
        return self._sizer

    def _images(self, requests: Sequence[SampleRequest]) -> list[Image.Image]:
        return self._engine.images(self._sampler, requests, lambda: self._cache.draw(self._sampler, requests))

    @contextlib.contextmanager
    def _vae_on(self, device: torch.device) -> Iterator[None]:
        """Move the VAE to the device within this context if it fits; otherwise each image places it anew."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._sampler.vae_on(device))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                beside.free_traceback(error)
            yield

    def _note_shortage(self, journal: Journal) -> None:
        """Warn once how samples are decoded when memory is short."""
        by = self._sampler.decoded_by
        if by != self._decoded_by:
            self._decoded_by = by
            journal.warn(Message(DECODED[by]))

    def _tell(self, reports: Sequence[tuple[dict[int, Path], Failures]], training: Training) -> None:
        """Report in the first process the samples of all processes, and those that failed."""
        world, journal = training.world, training.journal
        if not world.main:
            return
        prompts_by_reason: dict[MessageLike, list[str | None]] = {}
        for prompt, why in (failure for _, failures in reports for failure in failures):
            prompts_by_reason.setdefault(why, []).append(prompt)
        for why, failed in prompts_by_reason.items():
            journal.warn(left_out(failed, why))
            journal.event("sample_failed", step=training.clock.step, text=why)
        for rank, (paths, _) in enumerate(reports):
            for number, path in paths.items():
                if rank != world.rank and path.is_file():  # missing if it is on another machine
                    with Image.open(path) as image:
                        journal.sampled(training.clock.step, number, path, image, self._seeded[number])

    def _judge(self, reports: Sequence[tuple[dict[int, Path], Failures]], training: Training) -> None:
        """Warn in the first process of images that became noise or do not change."""
        clock = training.clock
        files = [(self._seeded[number], path) for paths, _ in reports for number, path in paths.items()]
        if training.world.main and (verdict := self._changes.judge(files, clock.step, clock.done)):
            training.journal.warn(verdict, about="samples")

    def _reread(self, world: World, journal: Journal) -> list[Prompt] | None:
        """Return the changed prompts of the file, None without changes; the first process reads it for all."""
        stamp, changed = self._stamp(), None
        if world.main and self._file and stamp is not None and stamp != self._seen:
            self._seen = stamp
            try:
                changed = self._read(self._file)
            except Exception as error:
                template = "{why}. Until this is fixed, the previous prompts are used."
                journal.warn(Message(template, why=error_sentence(error)))
        changed = world.gather(changed)[0]
        return None if changed == self._prompts else changed

    def _use(self, changed: list[Prompt] | None, journal: Journal) -> None:
        """Switch to changed prompts, and encode missing ones if the text encoders were freed."""
        if changed is not None:
            self._prompts, self._all_encoded = changed, False
            name = self._file.name if self._file else ""
            journal.say(f"{name} was changed: {len(changed)} sample prompts from here on")
        if self._config.cache.text and not self._all_encoded:
            journal.phase(phases.ENCODING_PROMPTS)
            with in_evaluation_mode(self._components.encoders.values()):
                self._remember()

    def _request(self, prompt: Prompt) -> SampleRequest:
        """Return the sampler's request for a prompt; reads its images."""
        how = pixels.decoding(self._config)
        request = request_of(prompt, how)
        if prompt.controlnet_image:
            request = replace(request, guide=Image.fromarray(pixels.read_pixels(prompt.controlnet_image, how)))
        return replace(request, prompt=self._read_as(request.prompt), negative=self._read_as(request.negative))

    def _keep(self, number: int, image: Image.Image, training: Training, paths: dict[int, Path]) -> None:
        """Save a generated image, and report it."""
        if training.method.shards and not training.world.main:
            return
        prompt = self._seeded[number]
        path = self._path(number, prompt, training.clock)
        try:
            save_image(image, path, self._metadata(prompt))
        except UnwritableError as error:
            # Names all samples, so that one warning is enough for those that fail alike.
            with clear_errors(path.with_name(f"*{path.suffix}")):
                raise error.__cause__ or error from None
        paths[number] = path
        training.journal.sampled(training.clock.step, number, path, image, prompt)

    def _metadata(self, prompt: Prompt) -> dict[str, str]:
        """Return the texts in a sample's file: all settings to generate it again with the file of its step."""
        steps = self._sampler.count_steps(imageless_request(prompt))
        shown = plan.Column("", tuple(few_steps.sample_lora(self._config).items()))
        return plan.image_metadata(prompt, steps, shown, str(self._config.model.pretrained_model_name_or_path))

    def _path(self, number: int, prompt: Prompt, clock: Clock) -> Path:
        """Return <output_dir>/sample/<name>_<e000001 or 000100>_<00>_<time>_<seed>.png, as upstream names samples.

        Before the first step it is e000000.
        """
        save = self._config.save
        by_epoch = self._config.sample.sample_every_n_epochs or not clock.step
        when = f"e{clock.epoch if clock.step else 0:06d}" if by_epoch else f"{clock.step:06d}"
        name = f"{save.output_name}_" if save.output_name else ""
        moment = time.strftime("%Y%m%d%H%M%S")
        return Path(save.output_dir or "") / "sample" / f"{name}{when}_{number:02d}_{moment}_{prompt.seed}.png"


def left_out(failed: Sequence[str | None], why: MessageLike) -> Message:
    """Return the warning that these prompts have no sample for one reason; None stands for all prompts of a step."""
    if None in failed:
        return Message("sample_prompts: the samples of this step are left out ({why}); the training continues", why=why)
    first, *others = dict.fromkeys(map(_shortened_prompt, failed))
    if others:
        template = (
            "sample_prompts: the samples of {prompt} and {count} more are left out ({why}); the training continues"
        )
        return Message(template, prompt=first, count=len(others), why=why)
    return Message(
        "sample_prompts: the sample of {prompt} is left out ({why}); the training continues", prompt=first, why=why
    )


def _shortened_prompt(prompt: str | None) -> str:
    text = prompt or ""
    return f"'{text}'" if len(text) <= LONGEST_NAME else f"'{text[: LONGEST_NAME - 1]}…'"
