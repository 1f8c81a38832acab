"""SDXL checkpoints in the forms people have them: what is loaded, saved again, and refused."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from library.config.building import build_config
from library.config.problems import ConfigError
from library.families import family_for
from library.families.sdxl import random
from library.families.sdxl.family import SdxlFamily
from library.families.sdxl.options import SdxlLora
from library.families.shared import autoencoder, empty_weights, hub, random_tokenizers, tokenizers, unet_names
from tests import sdxl_files


def family(path, **options):
    return family_for(build_config(SdxlLora, {"pretrained_model_name_or_path": str(path), **options}))


def same(first, other):
    return first.keys() == other.keys() and all(
        first[name].dtype == other[name].dtype and torch.equal(first[name], other[name]) for name in first
    )


def problems(path, **options):
    return list(family(path, **options).problems())


def test_nothing_random_is_made_where_a_file_has_the_weights(tiny_sdxl):
    before = torch.get_rng_state()
    family(tiny_sdxl).load(torch.float32)
    with pytest.raises(ValueError), empty_weights.without_random_init():
        nn.Linear(4, 4)
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before)
    nn.Linear(4, 4)  # and is again afterwards
    assert not torch.equal(torch.get_rng_state(), before)
    assert PreTrainedModel.init_weights.__module__ == PreTrainedModel.__module__


def test_agrees_with_diffusers_single_file_loading(tiny_sdxl, tiny_sdxl_folder):
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_single_file(
        str(tiny_sdxl), config=str(tiny_sdxl_folder), local_files_only=True
    )
    parts = family(tiny_sdxl).load(torch.float32)
    theirs = (pipeline.unet, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2)
    ours = (parts.denoiser, parts.vae, parts.encoders["clip_l"], parts.encoders["clip_g"])
    for their, our in zip(theirs, ours, strict=True):
        assert same(their.state_dict(), our.state_dict())

    generator = torch.Generator().manual_seed(0)
    sample, states = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, 192, generator=generator)
    added = {"text_embeds": torch.randn(2, 128, generator=generator), "time_ids": torch.full((2, 6), 64.0)}
    call = (sample, torch.tensor([3.0, 900.0]), states)
    with torch.no_grad():
        expected = pipeline.unet(*call, added_cond_kwargs=added).sample
        assert torch.allclose(parts.denoiser(*call, added_cond_kwargs=added).sample, expected, atol=1e-6)
        pixels = torch.rand(1, 3, 32, 32, generator=generator)
        assert torch.equal(parts.vae.encode(pixels).latent_dist.mean, pipeline.vae.encode(pixels).latent_dist.mean)
        assert torch.equal(parts.vae.decode(sample).sample, pipeline.vae.decode(sample).sample)

        embeddings, _, pooled, _ = pipeline.encode_prompt("a photo of a cat", device="cpu", negative_prompt="blurry")
        text = family(tiny_sdxl).text(parts, ["a photo of a cat"])
    assert torch.allclose(torch.cat([text["hidden_state1"], text["hidden_state2"]], -1), embeddings, atol=1e-6)
    assert torch.allclose(text["pool2"], pooled, atol=1e-6)


def test_blocks_are_counted_from_names_as_they_are_in_the_model(tiny_sdxl, tiny_sdxl_folder):
    denoiser = family(tiny_sdxl).load(torch.float32).denoiser
    expected = Counter(
        type(module).__name__ for module in denoiser.modules() if type(module).__name__ in SdxlFamily.block_classes
    )
    single = {name.removeprefix("model.diffusion_model.") for name in load_file(tiny_sdxl) if "diffusion" in name}
    assert unet_names.count_unet_blocks(single) == unet_names.count_unet_blocks(denoiser.state_dict()) == expected
    last = expected["ResnetBlock2D"] - 1
    for path in (tiny_sdxl, tiny_sdxl_folder):
        assert not problems(path, compile=True, compile_blocks=f"resnet:0-{last}")
        (told,) = problems(path, compile=True, compile_blocks=f"resnet:{last + 1}")
        assert f"the last is resnet:{last}" in str(told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loaded_file_is_exported_bit_for_bit(tmp_path, dtype):
    path = random.write_random_model(tmp_path, dtype=dtype)
    stored = load_file(path)
    stored["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    stored["v_pred"] = torch.tensor([])  # a mark that some checkpoints carry for other programs
    save_file(stored, path)
    loaded = family(path)
    assert same(loaded.export(loaded.load(dtype)), stored)


def test_a_diffusers_folder_exports_the_same_file(tiny_sdxl, tiny_sdxl_folder):
    loaded = family(tiny_sdxl_folder)
    assert list(loaded.problems()) == []
    assert same(loaded.export(loaded.load(torch.float32)), load_file(tiny_sdxl))


def test_sizes_come_from_the_file(tmp_path):
    sizes = random.SdxlSizes(
        unet=(32, 64, 128), depth=(0, 2, 1), vae=(32, 64), clip_l=128, clip_g=64, clip_l_layers=3, clip_g_layers=3
    )
    path = random.write_random_model(tmp_path, sizes=sizes)
    parts = family(path).load(torch.bfloat16)
    assert list(parts.denoiser.config.attention_head_dim) == [1, 1, 2]
    assert list(parts.denoiser.config.transformer_layers_per_block) == [1, 2, 1]
    assert parts.encoders["clip_l"].config.num_attention_heads == 2
    assert len(parts.vae.encoder.down_blocks) == 2
    assert same(family(path).export(family(path).load(torch.float16)), load_file(path))


def test_all_attention_shares_one_processor(tiny_sdxl):
    parts = family(tiny_sdxl).load(torch.float32)
    assert len({id(processor) for processor in parts.denoiser.attn_processors.values()}) == 1


def test_dtypes_and_no_half_vae(tiny_sdxl):
    parts = family(tiny_sdxl, no_half_vae=True).load(torch.bfloat16)
    assert {p.dtype for p in parts.denoiser.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in parts.vae.parameters()} == {torch.float32}
    assert {p.dtype for p in family(tiny_sdxl).load(torch.bfloat16).vae.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in parts.denoiser.parameters())
    assert not any(t.is_meta for p in parts.encoders.values() for t in (*p.parameters(), *p.buffers()))


def test_names_of_compiled_models_are_cleaned(tiny_sdxl, tmp_path):
    stored = load_file(tiny_sdxl)
    prefix = "model.diffusion_model."
    wrapped = {name.replace(prefix, f"{prefix}_orig_mod."): tensor for name, tensor in stored.items()}
    path = tmp_path / "compiled.safetensors"
    save_file(wrapped, path)
    loaded = family(path, tokenizer_cache_dir=str(_tokenizers(tiny_sdxl, tmp_path)))
    assert list(loaded.problems()) == []
    assert same(loaded.export(loaded.load(torch.float32)), stored)


def _tokenizers(checkpoint, tmp_path):
    """A --tokenizer_cache_dir filled from a tiny checkpoint's folder."""
    for name, folder in ((tokenizers.CLIP_L, "tokenizer"), (tokenizers.CLIP_G, "tokenizer_2")):
        shutil.copytree(checkpoint.parent / folder, tmp_path / "cache" / name.replace("/", "_"), dirs_exist_ok=True)
    return tmp_path / "cache"


def test_a_ckpt_is_read_without_running_what_is_in_it(tiny_sdxl, tmp_path):
    cache = str(_tokenizers(tiny_sdxl, tmp_path))
    stored = load_file(tiny_sdxl)
    torch.save({"state_dict": stored, "global_step": 3}, tmp_path / "good.ckpt")
    loaded = family(tmp_path / "good.ckpt", tokenizer_cache_dir=cache)
    assert list(loaded.problems()) == []
    assert same(loaded.export(loaded.load(torch.float32)), stored)

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"state_dict": Trap()}, tmp_path / "bad.ckpt")
    (problem,) = family(tmp_path / "bad.ckpt", tokenizer_cache_dir=cache).problems()
    assert problem.option == "pretrained_model_name_or_path" and "convert it to .safetensors" in str(problem)
    (problem,) = family(tiny_sdxl, vae=str(tmp_path / "bad.ckpt")).problems()
    assert problem.option == "vae" and "convert it to .safetensors" in str(problem)
    with pytest.raises(ConfigError, match="convert it to .safetensors"):
        family(tmp_path / "bad.ckpt", tokenizer_cache_dir=cache).load(torch.float32)
    assert not (tmp_path / "sprung").exists()


def test_without_mmap_the_same_is_loaded(tiny_sdxl):
    loaded = family(tiny_sdxl, disable_mmap_load_safetensors=True)
    assert same(loaded.export(loaded.load(torch.float32)), load_file(tiny_sdxl))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Another model than the tiny checkpoint: a single file, and a folder of diffusers."""
    folder = tmp_path_factory.mktemp("other")
    return random.write_random_model(folder, seed=7, dtype=torch.float32), sdxl_files.write_diffusers(
        folder / "d", seed=7, dtype=torch.float32
    )


@pytest.mark.parametrize("layout", ["ldm with prefix", "ldm", "diffusers", "folder", "whole folder"])
def test_another_vae_in_either_layout(tiny_sdxl, tmp_path, layout, others):
    single, other = others
    if layout in ("folder", "whole folder"):
        vae = other / "vae" if layout == "folder" else other
    else:
        other = single
        stored = load_file(other)
        prefix = "first_stage_model."
        tensors = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
        if layout != "ldm with prefix":
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if layout == "diffusers":
            tensors = autoencoder.vae_to_diffusers(tensors)
        vae = tmp_path / "vae.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, vae)
    loaded = family(tiny_sdxl, vae=str(vae))
    assert list(loaded.problems()) == []
    parts, plain = loaded.load(torch.float32), family(tiny_sdxl).load(torch.float32)
    assert same(parts.vae.state_dict(), family(other).load(torch.float32).vae.state_dict())
    assert same(parts.denoiser.state_dict(), plain.denoiser.state_dict())
    assert not same(parts.vae.state_dict(), plain.vae.state_dict())


def without(stored, prefix):
    return {name: tensor for name, tensor in stored.items() if not name.startswith(prefix)}


def test_files_that_are_something_else_are_named(tiny_sdxl, tmp_path):
    stored = load_file(tiny_sdxl)
    some = torch.zeros(1)
    cases = {
        "flux": ({"double_blocks.0.img_attn.qkv.weight": some}, "FLUX.1 transformer: train it with flux_train_network"),
        "lora": ({"lora_unet_x.lora_down.weight": some}, "is a LoRA file, not a model: give it as --network_weights"),
        "sd15": (
            {"model.diffusion_model.input_blocks.0.0.weight": some, "cond_stage_model.transformer.x": some.clone()},
            "is an SD 1.5 checkpoint: train it with train_network",
        ),
        "unet": (without(stored, "conditioner."), "has no text encoders"),
        "no_vae": (without(stored, "first_stage_model."), "holds no VAE: give a VAE with --vae"),
        "no_clip_l": (without(stored, "conditioner.embedders.0."), "holds no first text encoder (CLIP-L)"),
        "what": ({"x": some}, "is a checkpoint of an unknown kind"),
        "inpaint": (
            stored | {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(32, 9, 3, 3)},
            "takes 9 channels",
        ),
        "distilled": (
            without(stored, "model.diffusion_model.output_blocks.1.1.transformer_blocks.1."),
            "distilled U-Net",
        ),
    }
    cache = str(_tokenizers(tiny_sdxl, tmp_path))
    for name, (tensors, expected) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        messages = problems(path, tokenizer_cache_dir=cache)
        assert len(messages) == 1, (name, messages)
        assert expected in str(messages[0]), (name, messages)
        with pytest.raises(ConfigError):
            family(path, tokenizer_cache_dir=cache).load(torch.float32)
    assert problems(tmp_path / "no_vae.safetensors", vae=str(tiny_sdxl), tokenizer_cache_dir=cache) == []


def test_files_that_are_not_there_or_damaged(tiny_sdxl, tmp_path):
    cache = str(_tokenizers(tiny_sdxl, tmp_path))
    whole = tiny_sdxl.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "html.safetensors").write_text("<!DOCTYPE html>" * 10)
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 99\n")
    (tmp_path / "torch.safetensors").write_bytes(b"PK\x03\x04\0\0\x08\x08" + bytes(99))
    (tmp_path / "nothing.safetensors").touch()
    (tmp_path / "short.safetensors").write_bytes(bytes(8))
    (tmp_path / "empty").mkdir()
    cases = {
        "missing.safetensors": "does not exist",
        "cut.safetensors": "was cut short",
        "html.safetensors": "is a web page",
        "pointer.safetensors": "is only a pointer of Git LFS",
        "torch.safetensors": "may hold code and is not opened",
        "nothing.safetensors": "is empty: download it again",
        "short.safetensors": "is not a safetensors file",
        "empty": "not a folder of an SDXL model",
    }
    for name, expected in cases.items():
        messages = problems(tmp_path / name, tokenizer_cache_dir=cache)
        assert len(messages) == 1, messages
        assert expected in str(messages[0]) and str(messages[0]).startswith("--pretrained_model_name_or_path: "), (
            messages
        )
    assert "does not exist" in str(problems(tiny_sdxl, vae=str(tmp_path / "vae.safetensors"))[0])
    (tmp_path / "lora.safetensors").touch()
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(1)}, tmp_path / "lora.safetensors")
    assert "is a LoRA file: give an SDXL VAE" in str(problems(tiny_sdxl, vae=str(tmp_path / "lora.safetensors"))[0])


def test_an_incomplete_folder_is_named(tmp_path):
    folder = sdxl_files.write_diffusers(tmp_path / "model")
    shutil.rmtree(folder / "text_encoder_2")
    assert any("has no text_encoder_2 folder" in str(problem) for problem in problems(folder))


def test_missing_tokenizers_offline_are_one_sentence_each(tiny_sdxl, tmp_path):
    alone = tmp_path / "alone" / "model.safetensors"
    alone.parent.mkdir()
    alone.write_bytes(tiny_sdxl.read_bytes())
    messages = problems(alone, tokenizer_cache_dir=str(tmp_path / "cache"))
    assert len(messages) == 1
    assert "openai/clip-vit-large-patch14" in str(messages[0])
    assert str(tmp_path / "cache" / "openai_clip-vit-large-patch14") in str(messages[0])
    assert "\n" not in str(messages[0])


def test_a_tokenizer_of_another_kind_is_passed_over(tiny_sdxl, tmp_path):
    random_tokenizers.t5_tokenizer(tmp_path / "tokenizer_2")  # as in a FLUX folder
    (tmp_path / "model.safetensors").write_bytes(b"")
    cache = _tokenizers(tiny_sdxl, tmp_path)
    tokenizer = tokenizers.find_tokenizer(tokenizers.CLIP_G, tmp_path / "model.safetensors", "tokenizer_2", cache)
    assert tokenizer == cache / tokenizers.CLIP_G.replace("/", "_")


def test_a_download_is_kept_in_the_tokenizer_folder(tiny_sdxl, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "download_tokenizer", lambda name, token, looked: tiny_sdxl.parent / "tokenizer")
    tokenizer = tokenizers.find_tokenizer(tokenizers.CLIP_L, None, "tokenizer", tmp_path / "kept")
    assert tokenizer == tmp_path / "kept" / "openai_clip-vit-large-patch14"
    assert tokenizers.load_tokenizer(tokenizer, tokenizers.CLIP_L)("a photo").input_ids
    assert not list(tokenizer.glob(".*"))


def test_a_hugging_face_id_fetches_each_part_once(tiny_sdxl_folder, monkeypatch):
    asked = {}
    files = [f"{p}/{n}{m}.safetensors" for p, n in _STEMS.items() for m in ("", ".fp16")]
    files += ["unet/config.json", "tokenizer/vocab.json", "sd_xl_base.safetensors", "unet/openvino_model.bin"]

    def snapshot_download(name, allow_patterns=None, token=None, local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing here")
        asked.update(name=name, files=sorted(allow_patterns), token=token)
        return str(tiny_sdxl_folder)

    about = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, token=None, timeout=None: about)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setenv("HF_TOKEN", "secret")
    loaded = family("someone/sdxl")
    assert not [problem for problem in loaded.problems() if "pretrained" in str(problem)]
    assert asked.get("name") != "someone/sdxl"
    loaded.load(torch.float16)
    assert (asked["name"], asked["token"]) == ("someone/sdxl", "secret")
    assert [f for f in asked["files"] if f.endswith(".safetensors")] == sorted(
        f"{part}/{name}.fp16.safetensors" for part, name in _STEMS.items()
    )
    loaded.load(torch.bfloat16)
    assert not any(".fp16" in file for file in asked["files"])


_STEMS = {
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}


@pytest.mark.parametrize("places", [[], [Path("models/tokenizer")]], ids=["nowhere", "a folder"])
def test_a_missing_tokenizer_says_first_what_to_do(monkeypatch, places):
    def list_repository(name, token):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(tokenizers.hub, "list_repository", list_repository)
    with pytest.raises(ConfigError) as raised:
        tokenizers.download_tokenizer(tokenizers.CLIP_L, None, places)
    text = str(raised.value)
    assert text.index("is missing") < text.index("go online once, or copy its files") < text.index("it is neither in")
    assert text.endswith("its download failed: no route")


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (
            ConnectionError("no route"),
            "not in the Hugging Face cache and could not be downloaded (no route): go online",
        ),
        (None, "no answer within"),
    ],
)
def test_an_id_that_cannot_be_reached_is_known_at_once_and_reported_once(monkeypatch, fails, words):
    def model_info(self, name, **_):
        if fails is None:
            Event().wait(60)  # a name server that does not answer
        raise fails

    monkeypatch.setattr(hub, "HUB_TIMEOUT", -0.9)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    (said,) = family("someone/sdxl").problems()
    assert "--pretrained_model_name_or_path: someone/sdxl" in str(said) and words in str(said)


def test_an_id_that_cannot_be_fetched_is_one_sentence():
    with pytest.raises(ConfigError, match="someone/sdxl is not in the Hugging Face cache"):
        family("someone/sdxl").load(torch.float32)


def test_sharded_and_half_precision_folders(tiny_sdxl_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_sdxl_folder, folder)
    whole = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(whole)
    save_file({n: t.half() for n, t in tensors.items()}, folder / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    names = sorted(tensors)
    shards = {f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, folder / "unet" / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()
    assert problems(folder) == []
    assert same(family(folder).load(torch.float32).denoiser.state_dict(), tensors)
    half = family(folder).load(torch.float16).denoiser.state_dict()
    assert same(half, {name: tensor.half() for name, tensor in tensors.items()})


def test_the_tiny_checkpoint_is_the_same_every_time(tmp_path):
    first, two = (load_file(random.write_random_model(tmp_path / name)) for name in ("a", "b"))
    assert same(first, two)
    assert not same(first, load_file(random.write_random_model(tmp_path / "c", seed=1)))
    assert (tmp_path / "a" / "tiny_sdxl.safetensors").stat().st_size < 10_000_000
    for file in ("tokenizer/vocab.json", "tokenizer/merges.txt"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_family_says_what_it_is(tiny_sdxl):
    loaded = family(tiny_sdxl)
    assert (loaded.name, loaded.architecture, loaded.grid) == ("sdxl", "stable-diffusion-xl-v1-base", 32)
    assert loaded.latent_cache.suffix == "_sdxl.npz"
    assert loaded.text_cache.suffix == "_te_outputs.npz"
    assert loaded.text_cache.keys == ("hidden_state1", "hidden_state2", "pool2")
    classes = {type(module).__name__ for module in loaded.load(torch.float32).denoiser.modules()}
    assert {*loaded.block_classes, *loaded.adapter_targets} <= classes


def test_a_model_or_vae_that_is_not_whole_says_what_is_missing_before_it_is_loaded(
    tiny_sdxl, tiny_sdxl_folder, tmp_path
):
    whole = load_file(tiny_sdxl)
    places = {
        "model.diffusion_model.output_blocks.5.0.out_layers.0.weight": "unet.up_blocks.1.resnets.2.norm2.weight",
        "first_stage_model.decoder.mid.attn_1.q.weight": "vae.decoder.mid_block.attentions.0.to_q.weight",
        "conditioner.embedders.0.transformer.text_model.encoder.layers.1.mlp.fc1.bias": (
            "text_encoder.text_model.encoder.layers.1.mlp.fc1.bias"
        ),
        "conditioner.embedders.1.model.transformer.resblocks.1.ln_2.bias": (
            "text_encoder_2.text_model.encoder.layers.1.layer_norm2.bias"
        ),
    }
    tokens = str(_tokenizers(tiny_sdxl, tmp_path))
    path = tmp_path / "cut.safetensors"
    for name, called in places.items():
        save_file({key: tensor for key, tensor in whole.items() if key != name}, path)
        (problem,) = problems(path)
        assert "is an SDXL checkpoint that is not complete: it lacks 1 of its " in str(
            problem
        ) and f"({called})" in str(problem)
    vae = {key.removeprefix("first_stage_model."): tensor for key, tensor in whole.items() if key.startswith("first")}
    other = tmp_path / "vae.safetensors"
    save_file(vae, other)
    save_file({key: tensor for key, tensor in whole.items() if not key.startswith("first")}, path)
    assert problems(path, vae=other, tokenizer_cache_dir=tokens) == []
    family(path, vae=str(other), tokenizer_cache_dir=tokens).load(torch.float32)
    vae.pop("decoder.mid.attn_1.q.weight")
    save_file(vae, other)
    (problem,) = problems(tiny_sdxl, vae=other)
    assert "is a VAE that is not complete: it lacks 1 of its " in str(problem) and problem.option == "vae"
    folder = tmp_path / "folder"
    shutil.copytree(tiny_sdxl_folder, folder)
    file = next((folder / "text_encoder_2").glob("*.safetensors"))
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if name.endswith("layers.1.layer_norm2.bias")))
    save_file(tensors, file)
    (problem,) = problems(folder)
    assert "(text_encoder_2.text_model.encoder.layers.1.layer_norm2.bias)" in str(problem)
