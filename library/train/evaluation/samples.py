"""Sample images during training, from the same prompts and seeds each time, so that they can be compared."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from library.compiler import cudagraph
from library.config import phases
from library.config.problems import ConfigError, Message, MessageLike
from library.config.run_config import RunConfig
from library.data import pixels
from library.data.images import ImageSet
from library.distributed.world import World
from library.families.base import Family, ModelComponents, SampleRequest
from library.families.shared.decoding import is_out_of_memory
from library.files import write_atomic
from library.runs.record import sentence
from library.sampling import caption_prompts, prompts
from library.sampling.prompts import Prompt
from library.sampling.requests import request_of
from library.train import beside
from library.train.evaluation.validation import evaluation_mode
from library.train.journal import Journal
from library.train.step.clock import Clock
from library.train.stop_requests import WorkCancelled
from library.train.training import Training

NOT_LISTED = "sample_prompts: the samples of this step are not listed ({why}); the training goes on"
NOT_ENCODED = "sample_prompts: the prompts could not be encoded ({why}); that is tried again when samples are due"
DECODED = {
    "tiles": "sample_prompts: memory is too short to decode a sample at once, so samples are decoded in tiles",
    "CPU": "sample_prompts: the GPU lacks the memory to decode samples, so they are decoded on the CPU, which is slow",
}


# Why: docs/decisions/2026-11-20-previews-run-eagerly.md
class SampleRunner:
    """Generates the images of the prompt file when due. The file is read again if it was changed during the training.

    Random numbers and compiled graphs of the training stay as they are: every image has its own generator, and the
    blocks run eagerly while sampling.
    """

    def __init__(self, family: Family, components: ModelComponents, config: RunConfig, images: ImageSet) -> None:
        self._components, self._config = components, config
        sample = config.sample
        self.wanted = sample.wanted  # the user may request samples at any time
        self._prompts: list[Prompt] = []
        self._decoded_by = ""
        self._all_encoded = False  # whether the prompts are encoded, where the text encoders are freed
        if not self.wanted:
            return
        self._sampler = family.sampler(components)
        self._file = Path(sample.sample_prompts) if sample.sample_prompts else None
        self._defaults = {**family.sample_defaults, "sample_sampler": sample.sample_sampler}
        self._multiple = family.sample_multiple
        self._seen = self._stamp()
        self._prompts = self._read(self._file) if self._file else self._of_captions(images)

    def _of_captions(self, images: ImageSet) -> list[Prompt]:
        found, few = caption_prompts.prompts_from(images, self._config), caption_prompts.with_few_steps(self._defaults)
        return [prompts.with_defaults(prompt, few, self._multiple) for prompt in found]

    def _stamp(self) -> tuple[int, int] | None:
        if not self._file:
            return None
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self, file: Path) -> list[Prompt]:
        found = prompts.read(file)
        found = [prompts.shown(prompt, self._config.control_images) for prompt in found]
        return [prompts.with_defaults(prompt, self._defaults, self._multiple) for prompt in found]

    def encode_prompts(self, world: World, journal: Journal) -> None:
        """Encode the prompts while the text encoders are loaded: with cached text they are freed before the first
        step. What fails is a warning, and tried again when samples are due."""
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
            why = beside.described(error, self._config, journal.doing)
            for encoder in encoders:
                encoder.to("cpu")
            journal.warn(Message(NOT_ENCODED, why=why))

    def _remember(self) -> None:
        """Encode the prompts that are not encoded yet, with the text encoders as they are, or read to the CPU again."""
        self._all_encoded, requests = False, self._requests()
        if self._sampler.unknown(requests):
            absent = self._components.read_again.keys() - self._components.encoders.keys()
            read = {name: self._components.read_again[name].read() for name in sorted(absent)}
            self._components.encoders |= read
            try:
                self._sampler.remember(requests)
            finally:
                for name in read:
                    del self._components.encoders[name]
        self._all_encoded = len(requests) == len(self._prompts)

    def _requests(self) -> list[SampleRequest]:
        """A request for each prompt whose images can be read; the samples of the others say why theirs cannot."""
        made = []
        for prompt in self._prompts:
            with contextlib.suppress(ConfigError):
                made.append(request_of(prompt, pixels.decoding(self._config)))
        return made

    def _read_as(self, text: str) -> str:
        return self._config.caption_change.of_prompt(text)

    def at_first(self, training: Training) -> None:
        """Before the first step, where that is asked for."""
        if self.wanted and self._config.sample.sample_at_first and not training.clock.step:
            self._sample_all(training)

    def when_due(self, training: Training) -> None:
        """After a step: at the end of an epoch, or every so many steps; or when somebody asks for it.

        Epochs win where both are set, as upstream. Prompts from captions are sampled after the last step as well.
        """
        sample = self._config.sample
        steps = None if sample.sample_every_n_epochs else sample.sample_every_n_steps
        due = any(training.clock.every(steps, sample.sample_every_n_epochs))
        due = due or (training.clock.done and sample.scheduled and not self._file)
        if (training.journal.requests.granted("sample") or due) and self.wanted:
            self._sample_all(training)

    def _sample_all(self, training: Training) -> None:
        training.step_log.settle()
        changed = self._reread(training.world, training.journal)
        made: dict[int, Path] = {}
        problems: list[MessageLike] = []
        try:
            self._use(changed, training.journal)
            training.journal.phase(phases.GENERATING_SAMPLES, 0, len(self._prompts))
            self._generate(training, made, problems)
        except WorkCancelled:
            training.journal.say("Not all samples are generated, as the training ends now.")
        except Exception as error:  # none could be tried, or networks could not be moved
            problems.append(beside.reason(error, training))
        beside.attempt(lambda: self._note_shortage(training.journal), NOT_LISTED, training)
        found = training.world.gather((made, list(dict.fromkeys(problems))))
        beside.attempt(lambda: self._tell(found, training), NOT_LISTED, training)

    def _generate(self, training: Training, made: dict[int, Path], problems: list[MessageLike]) -> None:
        """Generate this process' share of the images, with the VAE on the device for all of them."""
        world, device = training.world, training.world.device
        vae: Any = self._components.vae  # which is kept where samples are wanted
        networks = [self._components.denoiser, vae, *self._components.encoders.values()]
        with self._vae_on(device), evaluation_mode(networks, training):
            for number, prompt in enumerate(self._prompts):
                # Processes with parts of one model generate each image together.
                if training.method.shards or number % world.ranks == world.rank:
                    try:
                        self._sample_one(number, prompt, training, made)
                    except WorkCancelled:
                        raise
                    except Exception as error:  # a missing image, a full disk, a lack of memory, a broken VAE, ...
                        problems.append(beside.reason(error, training))
                training.journal.phase(phases.GENERATING_SAMPLES, number + 1, len(self._prompts))

    @contextlib.contextmanager
    def _vae_on(self, device: torch.device) -> Iterator[None]:
        """Within the context, the VAE is on the device where it fits there; else each image finds a place for it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._sampler.vae_on(device))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                beside.free(error)
            yield

    def _note_shortage(self, journal: Journal) -> None:
        """Say once how samples are decoded where memory is short."""
        by = self._sampler.decoded_by
        if by != self._decoded_by:
            self._decoded_by = by
            journal.warn(Message(DECODED[by]))

    def _tell(self, found: Sequence[tuple[dict[int, Path], list[MessageLike]]], training: Training) -> None:
        """Report in the first process what the others have generated, and which samples failed."""
        world, journal = training.world, training.journal
        if not world.main:
            return
        for rank, (made, problems) in enumerate(found):
            for why in problems:
                journal.warn(Message("sample_prompts: a sample is left out ({why}); the training goes on", why=why))
                journal.event("sample_failed", step=training.clock.step, text=why)
            for number, path in made.items():
                if rank != world.rank and path.is_file():  # another machine may keep its own
                    with Image.open(path) as image:
                        journal.sampled(training.clock.step, number, path, image, self._prompts[number])

    def _reread(self, world: World, journal: Journal) -> list[Prompt] | None:
        """The prompts of the file, None where they have not changed; the first process reads it for all."""
        stamp, changed = self._stamp(), None
        if world.main and self._file and stamp is not None and stamp != self._seen:
            self._seen = stamp
            try:
                changed = self._read(self._file)
            except Exception as error:
                why = error.said if isinstance(error, ConfigError) else sentence(error)
                journal.warn(Message("{why}. Until that is mended, the prompts from before are used.", why=why))
        changed = world.gather(changed)[0]
        return None if changed == self._prompts else changed

    def _use(self, changed: list[Prompt] | None, journal: Journal) -> None:
        """Use other prompts from here on, and encode what is not encoded yet where the text encoders were freed."""
        if changed is not None:
            self._prompts, self._all_encoded = changed, False
            name = self._file.name if self._file else ""
            journal.say(f"{name} was changed: {len(changed)} sample prompts from here on")
        if self._config.cache.text and not self._all_encoded:
            journal.phase(phases.ENCODING_PROMPTS)
            self._remember()

    def _sample_one(self, number: int, prompt: Prompt, training: Training, made: dict[int, Path]) -> None:
        how = pixels.decoding(self._config)
        request = request_of(prompt, how)
        if prompt.controlnet_image:
            request = replace(request, guide=Image.fromarray(pixels.read(prompt.controlnet_image, how)))
        request = replace(request, prompt=self._read_as(request.prompt), negative=self._read_as(request.negative))
        path = self._path(number, prompt, training.clock)
        image = cudagraph.with_room(self._components.denoiser, lambda: self._sampler(request))
        if training.method.shards and not training.world.main:
            return
        write_atomic(path, image.save)
        made[number] = path
        training.journal.sampled(training.clock.step, number, path, image, prompt)

    def _path(self, number: int, prompt: Prompt, clock: Clock) -> Path:
        """<output_dir>/sample/<name>_<e000001 or 000100>_<00>_<time>[_<seed>].png, as upstream names them.

        Before the first step it is e000000.
        """
        save = self._config.save
        by_epoch = self._config.sample.sample_every_n_epochs or not clock.step
        when = f"e{clock.epoch if clock.step else 0:06d}" if by_epoch else f"{clock.step:06d}"
        seed = "" if prompt.seed is None else f"_{prompt.seed}"
        name = f"{save.output_name}_" if save.output_name else ""
        moment = time.strftime("%Y%m%d%H%M%S")
        return Path(save.output_dir or "") / "sample" / f"{name}{when}_{number:02d}_{moment}{seed}.png"
