"""Another attention kernel for images: used there and nowhere else, and named if its package is missing."""

import logging
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from library.check import machine
from library.config.problems import ConfigError
from library.families.shared import attention
from library.memory import attention as kernels
from library.packages import KERNEL_PACKAGES
from library.sampling import generate, image_attention
from library.sampling.prompts import Prompt
from tests.sampling.test_engine import drawn, engine_of, opened, prompts_for
from tests.sampling.test_sampling import SCRIPTS, given, quiet, shallow  # noqa: F401
from tests.training import config_of, demo, squares, train  # noqa: F401

FLUX = "flux_train_network"


def with_attention(config, kernel, **options):
    return replace(config, sample=replace(config.sample, sample_attention=kernel, **options))


@pytest.fixture
def calls(monkeypatch):
    """A package sageattention that computes what PyTorch does and counts its calls."""
    seen = []

    def sageattn(q, k, v, tensor_layout, is_causal):
        assert tensor_layout == "HND" and not is_causal and not torch.is_grad_enabled()
        assert q.dtype == torch.bfloat16 and q.shape[-1] <= image_attention.LARGEST_SAGE_HEAD
        seen.append(q.shape)
        return F.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(
        sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn, __spec__=ModuleSpec("sageattention", None))
    )
    monkeypatch.setattr(image_attention, "SAGE_CALLS", [0])
    image_attention.sage.cache_clear()
    yield seen
    image_attention.sage.cache_clear()


# Whose blocks leave padded text out by a mask.
MASKED = ("qwen_image_train_network", "qwen_image_21_train_network", "zimage_train_network")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_family_uses_sageattention_for_images_alone(given, script, calls, caplog):  # noqa: F811
    """Those with masks say that it had no effect."""
    caplog.set_level(logging.WARNING)
    config = given(script)
    config = replace(config, precision=replace(config.precision, mixed_precision="bf16"))
    model = opened(config)
    prompts = prompts_for(model)
    (usual,) = drawn(model, engine_of(model, config), prompts)
    assert not calls
    (image,) = drawn(model, engine_of(model, with_attention(config, "sage")), prompts)
    assert (script in MASKED) == (not calls) == ("sage had no effect" in caplog.text)
    assert (image - usual).abs().mean() < 0.02 * usual.abs().mean()
    before = len(calls)
    drawn(model, engine_of(model, config), prompts)
    assert len(calls) == before and attention._for_images is None


def test_compiled_images_contain_sageattention_without_a_break(given, calls):  # noqa: F811
    config = given(FLUX)
    config = replace(config, precision=replace(config.precision, mixed_precision="bf16"))
    config = replace(config, compile=replace(config.compile, compile_backend="eager", compile_fullgraph=True))
    model = opened(config)
    engine = engine_of(model, with_attention(config, "sage", sample_compile="true"))
    drawn(model, engine, prompts_for(model))
    assert calls and engine.plan.log.events and not engine.plan.log.graph_breaks()
    engine.close()


def test_masks_wide_heads_and_float32_are_left_to_pytorch(calls):
    half, mask = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16), torch.ones(1, 1, 1, 8, dtype=torch.bool)
    wide = torch.randn(1, 2, 8, image_attention.LARGEST_SAGE_HEAD + 8, dtype=torch.bfloat16)
    with attention.replaced_for_images(image_attention.sage()), torch.no_grad():
        for x, masked in ((half, mask), (wide, None), (half.float(), None)):
            assert torch.equal(attention.attend(x, x, x, masked), F.scaled_dot_product_attention(x, x, x, masked))
        assert not calls
        attention.attend(half, half, half)
    assert len(calls) == 1


def test_a_training_with_images_by_another_kernel_is_the_same(demo, squares, tmp_path, calls):  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")
    values = {"train_data_dir": squares, "max_train_steps": 2, "seed": 5, "mixed_precision": "bf16"}
    values |= {"compile": True, "compile_backend": "eager", "compile_blocks": "single:0"}
    samples = {"sample_every_n_steps": 1, "sample_prompts": prompts}
    done = {
        kernel: train(config_of(demo, FLUX, output_dir=tmp_path / kernel, **values, **samples, sample_attention=kernel))
        for kernel in ("auto", "sage")
    }
    assert calls and not any(each.events("sample_failed") for each in done.values())
    first = done["auto"]
    for each in done.values():
        assert each.losses == first.losses and each.facts["compile"]["graphs"] == first.facts["compile"]["graphs"]
        assert not each.facts["compile"]["recompiles"]


@pytest.mark.parametrize("kernel", KERNEL_PACKAGES)
def test_a_missing_package_is_named_before_anything_is_loaded(given, tmp_path, kernel):  # noqa: F811
    package = KERNEL_PACKAGES[kernel][0]
    config = with_attention(given(FLUX), kernel)
    with pytest.raises(ConfigError, match=f"sample_attention: {kernel} needs the package {package}.*; use auto"):
        generate.check_before(config, [Prompt("a cat")])


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    {
        "flash3": "flash3 needs the package flash_attn_3, which is not installed here; use auto",
        "flash4": "flash4 needs the package flash-attn-4, which is not installed here; use auto",
        "cudnn": "there is no cudnn on this machine; choose one of auto, flash, math",
    }.items(),
)
def test_the_check_of_a_training_names_a_kernel_that_is_missing(given, kernel, sentence):  # noqa: F811
    config = given(FLUX)
    config = replace(config, memory=replace(config.memory, attention_kernel=kernel))
    (problem,) = [problem for problem in machine.find_machine_problems(config) if problem.option == "attention_kernel"]
    assert str(problem) == f"attention_kernel: {sentence}" and problem.fix == {"attention_kernel": "auto"}


def test_a_kernel_that_this_machine_lacks_is_named_with_its_option(given, tmp_path):  # noqa: F811
    config = with_attention(given(FLUX), "cudnn")
    with pytest.raises(ConfigError, match="sample_attention: there is no cudnn on this machine; choose one of auto"):
        generate.generate(config, generate.plan.plan_columns("together", []), [Prompt("a")], tmp_path, quiet)


def test_a_training_samples_with_its_own_kernel_where_the_machine_lacks_the_other(given, caplog):  # noqa: F811
    config = with_attention(given(FLUX), "cudnn")
    model = opened(config)
    (usual,) = drawn(model, engine_of(model, given(FLUX)), prompts_for(model))
    with image_attention.image_attention(config, torch.device("cpu"), in_training=True):
        (image,) = drawn(model, engine_of(model, given(FLUX)), prompts_for(model))
    assert torch.equal(image, usual)
    assert "Samples use the kernel of the training: sample_attention: there is no cudnn" in caplog.text


class NewerFlash:
    """Newer flash attention that can be activated, and then raises what it finds in calls."""

    def __init__(self, error):
        self.error, self.active = error, None

    def use(self, monkeypatch):
        monkeypatch.setattr(kernels, "offered", lambda device: ("flash", "math", "flash4"))
        functions = torch.nn.attention
        monkeypatch.setattr(functions, "current_flash_attention_impl", lambda: self.active)
        monkeypatch.setattr(functions, "activate_flash_attention_impl", lambda name: setattr(self, "active", name))
        monkeypatch.setattr(functions, "restore_flash_attention_impl", lambda: setattr(self, "active", None))
        monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", self.attend)

    def attend(self, q, k, v):
        assert self.active == "FA4"
        raise self.error


@pytest.mark.parametrize("option", ["sample_attention", "attention_kernel"])
def test_newer_flash_attention_that_does_not_fit_pytorch_is_named_and_taken_back(monkeypatch, option):
    newer = NewerFlash(ValueError("too many values to unpack (expected 2)"))
    with monkeypatch.context() as patches:
        newer.use(patches)
        with pytest.raises(ConfigError, match=rf"{option}: flash4 cannot be used here \(too many values .*use auto"):
            kernels.prefer(torch.device("cpu"), "flash4", option=option)
    assert newer.active is None
    with kernels.keep_attention_settings():
        kernels.prefer(torch.device("cpu"))


def test_sageattention_that_cannot_be_imported_is_named_and_a_training_samples_without_it(given, monkeypatch, caplog):  # noqa: F811
    without = SimpleNamespace(__spec__=ModuleSpec("sageattention", None))  # as of another version: no sageattn
    monkeypatch.setitem(sys.modules, "sageattention", without)
    image_attention.sage.cache_clear()
    config = with_attention(given(FLUX), "sage")
    device = torch.device("cpu")
    with (
        pytest.raises(ConfigError, match="sample_attention: sage cannot be used here .*sageattn.*; use auto"),
        image_attention.image_attention(config, device),
    ):
        pass
    with image_attention.image_attention(config, device, in_training=True):
        assert attention._for_images is None
    assert "Samples use the kernel of the training: sample_attention: sage cannot be used here" in caplog.text
