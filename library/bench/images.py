"""Images of a model, to be timed: a denoising step and a whole image, with random text."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from library import families, packages
from library.bench import prepared_model, subjects
from library.compiler.log import CompileLog
from library.config.json_types import JsonMapping, JsonObject
from library.config.run_config import RunConfig
from library.config.sections.sampling import SAGE
from library.families.base import Family, ModelComponents, SampleRequest
from library.measuring import timing
from library.measuring.candidates import IMAGE_WAYS, RECORDED
from library.memory import attention
from library.memory.prepare import prepare_denoiser
from library.memory.quantization import fp8_storage
from library.sampling.engine import LATENT, ImageEngine, ImagesLeft
from library.sampling.feature_cache import FeatureCache, block_chain

IMAGE_STEPS = 4  # of a measured image; each takes the same time
ONCE = timing.TimingPlan(steps=1, warmup=0, seconds=1.0)
# Operations that the host requests from the GPU -> their names in a profile.
HOST_OPERATIONS = {
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx"),
    "graphs": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync", "cudaMemcpy"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


def image_ways(device: torch.device) -> dict[str, JsonMapping]:
    """Return the ways to generate on this device: those of IMAGE_WAYS, and eagerly with each attention kernel.

    Only a GPU records.
    """
    ways = {way: options for way, options in IMAGE_WAYS.items() if device.type == "cuda" or RECORDED not in way}
    kernels = [kernel for kernel in attention.offered(device) if kernel != "math" or device.type == "cpu"]
    kernels += [SAGE] * packages.has_kernel(SAGE)
    by_kernel = {f"attention {kernel}": {**IMAGE_WAYS["eager"], "sample_attention": kernel} for kernel in kernels}
    return {**ways, **by_kernel}


class TimedImages:
    """A sampler and its engine, which generate one image again and again."""

    def __init__(
        self,
        components: ModelComponents,
        family: Family,
        config: RunConfig,
        device: torch.device,
        request: SampleRequest,
    ) -> None:
        """The denoiser is prepared already."""
        self._request, self._config, self._device = request, config, device
        self._sampler = family.sampler(components)
        self._sampler.requires_finite = False  # random weights may overflow
        self._log = CompileLog()
        self._cache = FeatureCache(self._sampler.denoiser, block_chain(family), config.sample.sample_cache)
        self.engine = ImageEngine(components.denoiser, family, config, device, self._log)
        shapes = families.random_module(config.family).input_shapes(family, components.denoiser)
        text = shapes.texts(2, torch.device("cpu"))
        if mask := family.text_cache.mask:
            text[mask] = torch.ones_like(text[mask])
        self._sampler.remember_encoded(request, text)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Generate within this context as if many images remained."""
        height, width = self._sampler.size(self._request)
        texts = 2 if self._sampler.is_guided(self._request) else 1
        left = ImagesLeft(10**6, ((texts, height // LATENT, width // LATENT),))
        passes = self.engine.running(left, records=not self._cache.is_on)
        with torch.no_grad(), prepared_model.autocast(self._config, self._device), passes:
            yield

    def denoise(self) -> Any:
        return self._drawn(self._sampler.latents)

    def image(self) -> Any:
        return self._drawn(self._sampler)

    def _drawn(self, sample: Callable[[SampleRequest], Any]) -> Any:
        def draw() -> Any:
            with self._cache.active(2 if self._sampler.one_by_one else 1):
                return sample(self._request)

        return self.engine.images(self._sampler, [self._request], draw)

    def facts(self) -> JsonObject:
        """Return what was compiled and recorded, and the reasons if not."""
        self._log.drain()
        total, recorder = self.engine.plan.log.summary(), self.engine.recorder
        compiled = {name: total[name] for name in ("num_graphs", "recompiles", "seconds", "cache_hits")}
        recorded: JsonObject = {"sizes": len(recorder.recordings), "replays": recorder.replays}
        reasons = {"not_recorded": recorder.why_not, "not_compiled": str(self.engine.why_eager)}
        facts: JsonObject = {"compile": compiled} if self.engine.plan.active else {}
        if self._cache.passes:
            facts["skipped"] = round(self._cache.skipped / self._cache.passes, 3)
        return {"recorded": recorded, **facts, **{name: why for name, why in reasons.items() if why}}


def host_operations(call: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Return how many kernels, graphs and copies the host launches on a GPU in a call, and how often it waits."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
    counts = {event.key: event.count for event in profiled.key_averages()}
    return {kind: sum(counts.get(name, 0) for name in names) for kind, names in HOST_OPERATIONS.items()}


@dataclass(frozen=True)
class ImageBench:
    """Measures the images of a subject at one size."""

    subject: subjects.FamilySubject
    device: torch.device
    plan: timing.TimingPlan
    side: int
    first_way: list[np.ndarray] = field(default_factory=list)  # its image, from which distances are measured

    def rows(self, way: str) -> Iterator[JsonObject]:
        """Yield a row for a denoising step, and one for an image of IMAGE_STEPS steps with its decoding."""
        config = self.subject.config(image_ways(self.device)[way])
        torch.manual_seed(0)  # every way has the same random weights and text
        trainable = self.subject.make(config, self.device)
        components, family = trainable.components, trainable.family
        components.denoiser.requires_grad_(False).eval()
        dtype = torch.float32 if config.model.float32_vae else fp8_storage.compute_type(config)
        components.vae = self.subject.vae(self.device, dtype)
        prepare_denoiser(components.denoiser, family, config, self.device, ())
        scale = float(family.sample_defaults.get("scale", 1.0))
        request = SampleRequest("a", "b", self.side, self.side, IMAGE_STEPS, scale, seed=1)
        timed = TimedImages(components, family, config, self.device, request)
        with timed.running():
            images: list[Any] = []
            first_one = timing.measure_call(lambda: images.append(timed.image()), self.device, ONCE)
            first = {"first_s": round(first_one.p50 / 1000, 3), **self._distance(np.asarray(images[0], np.float32))}
            row = {"resolution": self.side, "candidate": way, "status": "ok"}
            yield {"part": "first image", **row, **first_one.facts()}
            for part, call, steps in (
                ("denoising step", timed.denoise, IMAGE_STEPS),
                (f"image of {IMAGE_STEPS} steps", timed.image, 1),
            ):
                measured = timing.measure_call(call, self.device, self.plan)
                each = tuple(milliseconds / steps for milliseconds in measured.each)
                yield {
                    "part": part,
                    **row,
                    **replace(measured, each=each).facts(),
                    **timed.facts(),
                    **({**first, **host_operations(timed.denoise, self.device)} if steps == 1 else {}),
                }
        timed.engine.close()

    def _distance(self, image: np.ndarray) -> JsonObject:
        """Return how far an image [H, W, 3], 0 to 255, is from that of the first way: a mean of 0 to 1, and PSNR."""
        if not self.first_way:
            self.first_way.append(image)
            return {}
        difference = (image - self.first_way[0]) / 255
        error = float((difference**2).mean())
        psnr = {"psnr_db": round(-10 * math.log10(error), 1)} if error else {}
        return {"distance": round(float(np.abs(difference).mean()), 5), **psnr}
