"""8 bits for what does not learn: really 8 bits, close to 16, and out of the way of everything else."""

import gc
import weakref

import pytest
import torch

from library import families, methods
from library.data import encoding
from library.memory.compile_targets import blocks_by_class
from library.memory.prepare import prepare_denoiser
from library.memory.quantization import fp8_storage
from tests import flux_files, links, training
from tests.training import problems_and_remarks

BF16 = {"mixed_precision": "bf16"}
FP8 = {**BF16, "fp8_base": True}
LORAS = training.LORAS
WITH_TEXT = {"network_train_unet_only": False, "cache_text_encoder_outputs": False}


def prepared(demo, script, **values):
    """The parts of a training and their config, as they are when the first step begins."""
    config = training.config_of(demo, script, **values)
    family = families.family_for(config)
    parts = family.load(fp8_storage.storage_type(config), fp8_storage.compute_type(config))
    fp8_storage.store_encoders(parts.encoders, config)
    methods.attach_method(parts, family, config)
    prepare_denoiser(parts.denoiser, family, config, torch.device("cpu"), ((8, 8), (8, 16)))
    return family, parts


def nbytes(parameters):
    return sum(p.nbytes for p in parameters)


def frozen(network):
    return {name: p for name, p in network.named_parameters() if not p.requires_grad}


# ---- storage


@pytest.mark.parametrize("script", LORAS)
def test_the_base_takes_half_the_bytes(demo, script):
    family, parts = prepared(demo, script, **FP8)
    _, wide = prepared(demo, script, **BF16)
    blocks = [b for group in blocks_by_class(parts.denoiser, family.block_classes) for b in group]
    inside = {id(p) for block in blocks for p in block.parameters()}
    small, large = frozen(parts.denoiser), frozen(wide.denoiser)
    assert small.keys() == large.keys()
    for name, p in small.items():
        matrix = id(p) in inside and p.dim() >= 2
        assert p.dtype == (torch.float8_e4m3fn if matrix else torch.bfloat16), name
        assert p.untyped_storage().nbytes() == p.nbytes
        torch.testing.assert_close(p.float(), large[name].float(), rtol=2**-4, atol=2**-9)
    matrices = [name for name, p in small.items() if p.dtype == torch.float8_e4m3fn]
    assert nbytes(small[n] for n in matrices) * 2 == nbytes(large[n] for n in matrices)
    # Embeddings are a large part of a tiny model, and a small one of a real one.
    assert nbytes(small.values()) < 0.75 * nbytes(large.values())
    learning = [p for p in parts.denoiser.parameters() if p.requires_grad]
    assert learning and all(p.dtype == torch.float32 for p in learning)


def in_fp8(demo, script, folder):
    """The path of a copy of a script's base model with all its tensors in fp8, beside its tokenizers."""
    config = training.config_of(demo, script)
    for tokenizer in demo.models[config.family][config.family].parent.glob("tokenizer*"):
        links.link_or_copy(folder / tokenizer.name, tokenizer)
    return flux_files.write_fp8(config.model.pretrained_model_name_or_path, folder / "fp8.safetensors")


def remarks_on_rounding(demo, script, **values):
    remarks = problems_and_remarks(training.config_of(demo, script, **values))[1]
    return [remark for remark in remarks if "rounds nothing" in str(remark)]


@pytest.mark.parametrize("script", LORAS)
def test_a_file_in_8_bits_is_taken_unchanged(demo, squares, tmp_path, script):
    """Shared fp8 files hold all tensors in 8 bits; what cannot be computed with so is widened."""
    values = {"pretrained_model_name_or_path": in_fp8(demo, script, tmp_path)}
    _, parts = prepared(demo, script, **values, **FP8)
    kinds = {p.dtype for p in frozen(parts.denoiser).values()}
    assert kinds == {torch.float8_e4m3fn, torch.bfloat16}
    if script == "flux_train_network":
        assert all(
            p.dtype != torch.float8_e4m3fn for p in prepared(demo, script, **values, **BF16)[1].denoiser.parameters()
        )
    options = {"train_data_dir": squares, **values, "max_train_steps": 3}
    tensors = training.train(training.config_of(demo, script, **options, **FP8, output_dir=tmp_path / "a"))
    widened = training.train(training.config_of(demo, script, **options, **BF16, output_dir=tmp_path / "b"))
    assert tensors.losses == pytest.approx(widened.losses, rel=0.02)


@pytest.mark.parametrize("script", LORAS)
def test_the_check_says_that_fp8_base_rounds_nothing_in_an_fp8_file(demo, tmp_path, script):
    file = {"pretrained_model_name_or_path": in_fp8(demo, script, tmp_path)}
    (remark,) = remarks_on_rounding(demo, script, **file, **FP8)
    assert str(remark).startswith("fp8_base rounds nothing: the file of the image model")
    assert not remark.fix  # without the option the matrices would take twice the memory
    (remark,) = remarks_on_rounding(demo, script, **file, **BF16, fp8_base_unet=True)
    assert remark.option == "fp8_base_unet"
    assert not remarks_on_rounding(demo, script, **FP8)
    for other in ({}, {"int8_base": True}, {"fp8_base": True, "auto_compute": True}):  # int8 rounds them again
        assert not remarks_on_rounding(demo, script, **file, **BF16, **other)


def test_fp8_base_rounds_what_a_file_holds_in_more_bits_but_nothing_with_a_scale(demo, tmp_path):
    path = in_fp8(demo, "flux_train_network", tmp_path)
    tensors, name = flux_files.load(path), "double_blocks.0.img_attn.qkv"
    changes = ({f"{name}.weight": tensors[f"{name}.weight"].bfloat16()}, {f"{name}.scale_weight": torch.ones(1)})
    for count, change in enumerate(changes):
        other = flux_files.save(tensors | change, tmp_path / f"{count}.safetensors")
        remarks = remarks_on_rounding(demo, "flux_train_network", pretrained_model_name_or_path=other, **FP8)
        assert len(remarks) == count


def test_a_training_logs_that_fp8_base_rounds_nothing(demo, squares, tmp_path, capsys):
    path = in_fp8(demo, "flux_train_network", tmp_path)
    values = {"pretrained_model_name_or_path": path, "train_data_dir": squares, "max_train_steps": 1}
    config = training.config_of(demo, "flux_train_network", **values, **FP8, output_dir=tmp_path / "out")
    training.train(config)
    assert "fp8_base rounds nothing: the file of the image model" in capsys.readouterr().out


@pytest.mark.parametrize("script", LORAS)
def test_encoders_are_kept_in_8_bits_unless_only_the_image_model_shall_be(demo, script):
    _, parts = prepared(demo, script, **FP8, **WITH_TEXT)
    _, only = prepared(demo, script, **BF16, fp8_base_unet=True, **WITH_TEXT)
    _, wide = prepared(demo, script, **BF16, **WITH_TEXT)
    for name, encoder in parts.encoders.items():
        small, large = frozen(encoder), frozen(wide.encoders[name])
        matrices = {n for n, p in small.items() if p.dtype == torch.float8_e4m3fn}
        lists = ("layers.", ".block", "_list.")
        inside = {n for n, p in small.items() if p.dim() == 2 and any(part in n for part in lists)}
        assert matrices == inside - {n for n in small if "relative_attention_bias" in n}
        assert nbytes(small[n] for n in matrices) * 2 == nbytes(large[n] for n in matrices)
        assert all(p.dtype == torch.bfloat16 for p in frozen(only.encoders[name]).values())
    family = families.family_for(training.config_of(demo, script, **FP8))
    captions = ["a red circle on the sea", "smile"]
    with torch.no_grad():
        actual, expected = family.text(parts, captions), family.text(wide, captions)
    for key, value in expected.items():
        if value.is_floating_point() and value.any():
            off = (actual[key].float() - value.float()).norm() / value.float().norm()
            assert 0 < off < 0.1, key


@pytest.mark.parametrize("script", LORAS)
def test_losses_are_close_and_compiled_ones_too(demo, shapes, squares, tmp_path, script):
    options = {"train_data_dir": shapes, "resolution": "96", "max_train_steps": 3, **WITH_TEXT}
    if not script.startswith("flux_train"):  # graphs of any size take several times as long
        options |= {"train_data_dir": squares, "resolution": "64"} | training.STEADY.get(script, {})

    def trained(name, **more):
        return training.train(training.config_of(demo, script, **options, **more, output_dir=tmp_path / name))

    def assert_close(actual, expected, losses, norms):
        # A tiny model's loss is mostly noise, which it hardly predicts; gradients tell what it computes.
        assert actual.losses == pytest.approx(expected.losses, rel=losses)
        assert actual.numbers("grad_norm") == pytest.approx(expected.numbers("grad_norm"), rel=norms)

    wide, eight, only = trained("wide", **BF16), trained("eight", **FP8), trained("only", **BF16, fp8_base_unet=True)
    for values in (eight, only):
        assert values.losses != wide.losses
        assert_close(values, wide, losses=0.01, norms=0.06)
    if not script.startswith(("flux_train", "sdxl")):
        return  # the other families have the same linear layers; their blocks are compiled in test_integers.py
    # Of the U-Net's many graphs, which differ in channels alone, one of each kind; of FLUX.1 the quicker kind, whose
    # backward pass is traced with 8 bits, at several sizes, in compile/test_pairs.py.
    few = {"compile_blocks": training.FEW[script]}
    compiled = trained("all", **FP8, **few, compile=True, compile_backend="eager", compile_fullgraph=True)
    assert_close(compiled, eight, losses=0.002, norms=0.015)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0


def test_a_model_that_learns_is_never_kept_in_8_bits(demo):
    config = training.config_of(demo, "sdxl_train", **FP8, train_text_encoder=True, cache_text_encoder_outputs=False)
    family = families.family_for(config)
    parts = family.load(torch.float32, torch.bfloat16)
    fp8_storage.store_encoders(parts.encoders, config)
    methods.attach_method(parts, family, config)
    prepare_denoiser(parts.denoiser, family, config, torch.device("cpu"), ((8, 8), (8, 16)))
    kinds = {p.dtype for net in (parts.denoiser, *parts.encoders.values()) for p in net.parameters()}
    assert kinds == {torch.float32}


# ---- the types of what does not learn


@pytest.mark.parametrize(
    ("values", "encoders", "vae"),
    [
        ({}, torch.bfloat16, torch.bfloat16),
        ({"no_half_vae": True}, torch.bfloat16, torch.float32),
        ({"train_text_encoder": True, "cache_text_encoder_outputs": False}, torch.float32, torch.bfloat16),
        ({"full_bf16": True}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_what_does_not_learn_is_in_half_precision(demo, values, encoders, vae):
    config = training.config_of(demo, "sdxl_train", **BF16, **values)
    storage, compute = fp8_storage.storage_type(config), fp8_storage.compute_type(config)
    parts = families.family_for(config).load(storage, compute)
    assert {p.dtype for p in parts.denoiser.parameters()} == {
        torch.bfloat16 if "full_bf16" in values else torch.float32
    }
    assert {p.dtype for e in parts.encoders.values() for p in e.parameters()} == {encoders}
    assert {p.dtype for p in parts.vae.parameters()} == {vae}


# ---- encoders leave


def watched(monkeypatch, at_first_step):
    """Look at the encoders and the VAE of a training when its first step begins."""
    from library.train import loop

    seen = {}
    encode, compute = encoding.encode_missing_caches, loop.LossFunction.__call__

    def noted(images, family, parts, *how):
        encode(images, family, parts, *how)
        networks = {**parts.encoders, "vae": parts.vae}
        seen.update({name: weakref.ref(network) for name, network in networks.items()})

    def first(*args):
        if seen:
            gc.collect()
            at_first_step({name: ref() for name, ref in seen.items()})
            seen.clear()
        return compute(*args)

    monkeypatch.setattr(encoding, "encode_missing_caches", noted)
    monkeypatch.setattr(loop.LossFunction, "__call__", first)


@pytest.mark.parametrize("script", LORAS)
def test_cached_encoders_are_gone_from_memory(demo, squares, tmp_path, monkeypatch, script):
    left = {}
    watched(monkeypatch, lambda networks: left.update({name: net is None for name, net in networks.items()}))
    training.train(training.config_of(demo, script, train_data_dir=squares, output_dir=tmp_path, max_train_steps=1))
    assert left and all(left.values())


@pytest.mark.parametrize("script", ["sdxl_train", "flux_train"])
def test_encoders_that_the_file_needs_wait_on_the_host(demo, squares, tmp_path, monkeypatch, script):
    """Also when sample prompts have used them, and nothing was left to be cached."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 1 --d 1", encoding="utf-8")
    values = {"train_data_dir": squares, "output_dir": tmp_path / "o", "max_train_steps": 1, "sample_at_first": True}
    config = training.config_of(demo, script, **values, sample_prompts=prompts)
    moves = {}
    to = torch.nn.Module.to

    def noted(self, *args, **kwargs):
        if args and isinstance(args[0], str | torch.device):
            moves.setdefault(id(self), []).append(args[0])
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "to", noted)
    last = {}
    watched(
        monkeypatch, lambda nets: last.update({n: moves[id(net)][-1] for n, net in nets.items() if net is not None})
    )
    training.train(config)
    assert set(last) - {"vae"} == ({"clip_l", "clip_g"} if script == "sdxl_train" else {"clip_l", "t5xxl"})
    assert all(place == "cpu" for name, place in last.items() if name != "vae")
