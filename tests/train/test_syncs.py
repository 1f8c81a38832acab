"""In a training step nobody waits for the device.

The step runs on PyTorch's "meta" device, which has shapes and no numbers: whatever the host wants to read from it fails
at once, where a GPU would make it wait. Copies to the device must not block either; they are watched.
"""

import contextlib
import traceback
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.autoencoders import vae
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from library import data, families, methods
from library.compiler.log import CompileLog
from library.data import encoding
from library.data.loading import Batches
from library.distributed.world import World
from library.memory.prepare import prepare_denoiser
from library.optim.stochastic_rounding import StepRNG
from library.train.compiling.precompile import Precompiler
from library.train.loop import train_step
from library.train.step.clock import Clock
from library.train.step.loss import LossFunction
from library.train.step.rng import StepGenerators
from library.train.step.step_metrics import Meter
from library.train.step.stepper import Stepper
from library.train.step.updates import Updates
from library.train.step_log import StepLog
from library.train.stop_requests import ControlRequests
from tests.training import LORAS, ONE_ADAPTER, config_of, fresh

META = torch.device("meta")


class AttentionRecorder(TorchDispatchMode):
    """Notes every copy between devices that makes the host wait, with the place that asked for it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source, target = (args[0], result) if name == "_to_copy" else (args[1], args[0])
            waits = not kwargs.get("non_blocking", len(args) > 2 and args[2])
            if source.device != target.device and (waits or target.device.type == "cpu"):
                self.found.append(place(f"{name} {source.device} -> {target.device}"))
        return result


class Calls(TorchFunctionMode):
    """Notes tensors that are made on the device from numbers of the host, which is a copy as well."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and result.device == META:
            self.found.append(place(f"torch.{func.__name__}"))
        return result


def place(what):
    frames = [f for f in traceback.extract_stack() if "/library/" in f.filename.replace("\\", "/")]
    return f"{what}: " + " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.line}" for f in frames[:-4:-1])


@pytest.fixture
def meta_as_cpu(monkeypatch):
    """What PyTorch does not know for the meta device is answered as for a CPU: autocast, and random numbers."""
    drawn, original = vae.randn_tensor, torch.randn

    def randn(shape, generator, device, dtype):
        if torch.device(device) != META:  # what is kept beside the pictures that other tests read
            return drawn(shape, generator=generator, device=device, dtype=dtype)
        return original(shape, device=device, dtype=dtype)  # where diffusers would draw on the CPU and copy

    monkeypatch.setattr(vae, "randn_tensor", randn)
    on = StepRNG.generator_for
    monkeypatch.setattr(StepRNG, "generator_for", lambda self, device, *key: on(self, torch.device("cpu"), *key))
    for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
        real = getattr(torch, name)

        def on_cpu(device="cpu", *args, real=real, **values):
            return real("cpu" if str(values.pop("device_type", device)) == "meta" else device, *args, **values)

        monkeypatch.setattr(torch, name, on_cpu)


@pytest.fixture
def blocked_by(demo, squares, tmp_path, monkeypatch, meta_as_cpu):
    """Train a few steps on the meta device and return what made the host wait in the last of them."""

    def train(script, **values):
        fresh()
        values = {"train_data_dir": squares, "output_dir": tmp_path, "logging_dir": tmp_path / "logs"} | values
        config = config_of(demo, script, **values)
        monkeypatch.setattr(Meter, "lines", lambda self, wait=False: [])  # the numbers have not arrived yet
        world, journal, family = World(config), Mock(has_curves=True), families.family_for(config)
        images, components = data.scan(config), family.load(world.storage_dtype)
        encoding.encode_missing_caches(images, family, components, config, world, journal.phase)
        batches = Batches(images, config, 1)
        clock, generators = Clock.of(config, len(batches)), StepGenerators(1, world.device, 0)
        world.device = META
        live = [components.vae] * (not config.cache.latents)
        live += list(components.encoders.values()) * (not config.cache.text)
        for network in (components.denoiser, *live):
            network.to(META)
        method = methods.attach_method(components, family, config)
        world.place(components, method.differs, config.cache, keep_vae=False)
        with CompileLog() as log:
            prepared = prepare_denoiser(components.denoiser, family, config, META, batches.shapes, log=log)
            updates = Updates(method, config, world, 1, clock.total)
            method.train()
            compute_loss = LossFunction(family, components, method, config, world, generators, log)
            precompiler = Precompiler(config, world, journal, prepared.plan, clock)
            precompiler._passes = SimpleNamespace(recorder=None)  # `prepare` would run passes of its own
            step_log = StepLog(config, clock, world, journal, precompiler)
            stepper = Stepper(
                batches, clock, generators, world, ControlRequests(), config.steps.gradient_accumulation_steps
            )
            for window in stepper:
                watch = AttentionRecorder()
                with contextlib.ExitStack() as watching:
                    if clock.done:  # in the first step tables may go to the device, once
                        watching.enter_context(watch)
                        watching.enter_context(Calls(watch.found))
                    numbers, losses = train_step(window, stepper, compute_loss, updates, precompiler, watched=True)
                    step_log.push(numbers, losses, updates.rates(), stepper.timer.ended())
                assert len(window) == len(losses) == config.steps.gradient_accumulation_steps
        assert clock.done
        return watch.found

    return train


LIVE = {"cache_text_encoder_outputs": False, "cache_latents": False, "shuffle_caption": True}
FEW = {"network_args": ONE_ADAPTER}  # for what does not depend on adapters: on "meta" each layer takes long
CASES = {
    **{script: (script, {}) for script in (*LORAS, "sdxl_train", "flux_train")},  # whole models step alike
    "sdxl noise": (
        "sdxl_train_network",
        {
            "noise_offset": 0.1,
            "noise_offset_random_strength": True,
            "adaptive_noise_scale": 0.1,
            "ip_noise_gamma": 0.1,
            "ip_noise_gamma_random_strength": True,
            "multires_noise_iterations": 4,
            "zero_terminal_snr": True,
            "min_timestep": 10,
            "max_timestep": 900,
        },
    ),
    "sdxl weights": (
        "sdxl_train_network",
        {
            "v_parameterization": True,
            "min_snr_gamma": 5,
            "debiased_estimation_loss": True,
            "loss_type": "huber",
            "huber_schedule": "snr",
            "scale_v_pred_loss_like_noise_pred": True,
        },
    ),
    "sdxl live": (
        "sdxl_train_network",
        {
            **LIVE,
            "network_train_unet_only": False,
            "text_encoder_lr": [1e-4],
            "max_token_length": 150,
            "scale_weight_norms": 1.0,
            "network_dropout": 0.1,
            "gradient_accumulation_steps": 2,
            "flip_aug": True,
            "network_args": ["rank_dropout=0.1", "module_dropout=0.1"],
        },
    ),
    "sdxl full live": ("sdxl_train", {**LIVE, "train_text_encoder": True, "gradient_checkpointing": True}),
    "flux live": ("flux_train_network", {**LIVE, "network_train_unet_only": False, "text_encoder_lr": [1e-4]}),
    "flux live masked": (
        "flux_train_network",
        {**LIVE, "network_train_unet_only": False, "network_args": ["train_t5xxl=True"], "apply_t5_attn_mask": True},
    ),
    "flux mask": (
        "flux_train_network",
        {**FEW, "apply_t5_attn_mask": True, "loss_type": "smooth_l1", "huber_schedule": "constant", "alpha_mask": True},
    ),
    "flux full bf16": ("flux_train", {"full_bf16": True, "mixed_precision": "bf16", "max_grad_norm": 0.0}),
    **{
        f"flux {way}": (
            "flux_train_network",
            {
                **FEW,
                "timestep_sampling": way,
                "model_prediction_type": "sigma_scaled",
                "weighting_scheme": scheme,
                "ip_noise_gamma": 0.1,
                "loss_type": "huber",
                "huber_schedule": "exponential",
            },
        )
        for way, scheme in {
            "sigma": "logit_normal",
            "uniform": "cosmap",
            "sigmoid": "sigma_sqrt",
            "shift": "none",
            "flux_shift": "mode",
        }.items()
    },
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_in_a_step_waits_for_the_device(blocked_by, case):
    script, values = CASES[case]
    assert blocked_by(script, max_train_steps=2, **values) == []


def test_what_waits_is_seen(blocked_by, monkeypatch):
    """The watch itself: a number that is read, a choice by numbers, and a copy that blocks."""
    compute = LossFunction.__call__

    def spoil(change):
        monkeypatch.setattr(LossFunction, "__call__", lambda *args: change(compute(*args)))

    for change in (lambda loss: loss * loss.item(), lambda loss: loss if loss > 0 else None, lambda loss: loss.cpu()):
        spoil(change)
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            blocked_by("flux_train_network", max_train_steps=1, **FEW)
    spoil(lambda loss: loss * torch.tensor([2.0], device=META).sum())
    assert "torch.tensor" in str(blocked_by("flux_train_network", max_train_steps=2, **FEW))
    spoil(lambda loss: loss * torch.ones(1).to(META).sum())
    assert "_to_copy cpu -> meta" in str(blocked_by("flux_train_network", max_train_steps=2, **FEW))
    spoil(lambda loss: loss * torch.ones(1).to(META, non_blocking=True).sum())
    assert blocked_by("flux_train_network", max_train_steps=2, **FEW) == []
