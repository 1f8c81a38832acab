"""Sample images during training: the same prompts and seeds again and again, so that progress can be seen."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from library.families.base import SampleRequest
from library.files import write_atomic
from library.outputs import prompts
from library.outputs.prompts import Prompt
from library.train.evaluating import evaluation_mode
from library.train.stop_requests import WorkCancelled


class SampleRunner:
    """Draws the prompt file when it is due.

    Neither the random numbers nor the compiled graphs of training notice: every image has a generator of its own, and
    the blocks run eagerly while drawing.
    """

    def __init__(self, family: Any, parts: Any, config: Any, run: Any) -> None:
        self._parts, self._run, self._config = parts, run, config
        sample = config.sample
        self.wanted = bool(sample.sample_prompts)  # they can be asked for at any time, whatever the plan
        self._prompts: list[Prompt] = []
        if not self.wanted:
            return
        self._draw = family.sampler(parts)
        defaults = {**family.sample_defaults, "sample_sampler": sample.sample_sampler}
        read = prompts.read(sample.sample_prompts)
        self._prompts = [prompts.with_defaults(p, defaults, family.sample_multiple) for p in read]

    def remember(self) -> None:
        """Encode the prompts while the text encoders are there: with cached text they leave before the first step."""
        if self.wanted and self._config.cache.text:
            self._run.phase("encoding the sample prompts")
            for encoder in self._parts.encoders.values():
                encoder.to(self._run.device)
            self._draw.remember([(p.prompt, p.negative_prompt or "") for p in self._prompts])

    def at_first(self) -> None:
        """Before the first step, where that is asked for."""
        if self.wanted and self._config.sample.sample_at_first and not self._run.clock.step:
            self._draw_all()

    def when_due(self) -> None:
        """After a step: at the end of an epoch, or every so many steps; or when somebody asks for it.

        Epochs win where both are set, as upstream.
        """
        sample = self._config.sample
        steps = None if sample.sample_every_n_epochs else sample.sample_every_n_steps
        due = any(self._run.clock.every(steps, sample.sample_every_n_epochs))
        if (self._run.granted("sample") or due) and self.wanted:
            self._draw_all()

    def _draw_all(self) -> None:
        run = self._run
        run.settle()
        run.phase("drawing samples", 0, len(self._prompts))
        try:
            with self._as_for_use():
                for number, prompt in enumerate(self._prompts):
                    if number % run.ranks == run.rank:
                        self._draw_one(number, prompt)
                    run.phase("drawing samples", number + 1, len(self._prompts))
        except WorkCancelled:
            run.say("The samples are not drawn to the end, as the training ends now.")
        run.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def _as_for_use(self) -> Iterator[None]:
        """All networks as for use, on the device; everything as before afterwards."""
        run, parts = self._run, self._parts
        home = parts.vae.device
        parts.vae.to(run.device)
        try:
            with evaluation_mode([parts.denoiser, parts.vae, *parts.encoders.values()], run):
                yield
        finally:
            parts.vae.to(home)

    def _draw_one(self, number: int, prompt: Prompt) -> None:
        filled: dict[str, Any] = {"width": prompt.width, "height": prompt.height, "steps": prompt.sample_steps}
        filled |= {"scale": prompt.scale, "guidance": prompt.guidance_scale, "seed": prompt.seed}
        negative = prompt.negative_prompt or ""
        request = SampleRequest(prompt.prompt, negative, **filled, sampler_name=prompt.sample_sampler)
        path = self._path(number, prompt)
        image = self._draw(request)
        write_atomic(path, image.save)
        self._run.sampled(number, path, image, prompt)

    def _path(self, number: int, prompt: Prompt) -> Path:
        """<output_dir>/sample/<name>_<e000001 or 000100>_<00>_<time>[_<seed>].png, as upstream names them.

        Before the first step it is e000000.
        """
        clock, save = self._run.clock, self._config.save
        by_epoch = self._config.sample.sample_every_n_epochs or not clock.step
        when = f"e{clock.epoch if clock.step else 0:06d}" if by_epoch else f"{clock.step:06d}"
        seed = "" if prompt.seed is None else f"_{prompt.seed}"
        name = f"{save.output_name}_" if save.output_name else ""
        moment = time.strftime("%Y%m%d%H%M%S")
        return Path(save.output_dir) / "sample" / f"{name}{when}_{number:02d}_{moment}{seed}.png"
