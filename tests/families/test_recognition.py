"""What a file is, by its header, for all families: prefixes of other programs, models that are not trained here, and
files of other families in every slot."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import library.demo as demo_module
from library import families
from library.config.building import build_config
from library.config.schema import options_of
from library.demo import files
from library.families import recognition
from library.families.anima import random as random_anima
from library.families.shared import scaled_weights, tensor_names, weights
from tests.training import LORAS, config_of

BASE = "pretrained_model_name_or_path"
ENCODERS = ("clip_l", "t5xxl", "qwen3", "text_encoder")  # options that name one
RELATIVES = [
    f"{name}_{families.lora_script(families.owner(name))}"
    for facts in families.all_families()
    for name in facts.demo_variants
]
# Names and shapes that others' models have, as far as they tell them apart.
UNTRAINED = {
    "a transformer like FLUX.1's": {
        "double_blocks.0.img_attn.qkv.weight": (3, 1),
        "double_blocks.0.img_attn.norm.key_norm.weight": (1,),
    },
    "a Z-Image-Omni transformer": {
        "cap_embedder.1.weight": (3840, 1),
        "cap_pad_token": (1, 1),
        "layers.0.attention_norm1.weight": (1,),
        "siglip_embedder.1.weight": (1, 1),
    },
    "a Lumina 2 transformer": {"cap_embedder.1.weight": (2304, 1)},
    "a text adapter of Anima": {"llm_adapter.blocks.0.cross_attn.o_proj.weight": (1, 1)},
    "a Cosmos-Predict2 transformer": {"blocks.0.adaln_modulation_self_attn.1.weight": (1, 1)},
    "a ControlNet": {
        "control_model.input_blocks.1.1.proj_in.weight": (1, 1, 1, 1),
        "control_model.input_hint_block.0.weight": (1, 1, 1, 1),
    },
    "a Nunchaku file of 4 bits": {
        "transformer_blocks.0.qkv_proj.qweight": (1, 1),
        "single_transformer_blocks.0.mlp_fc1.qweight": (1, 1),
    },
    "an nf4 file of 4 bits": {
        "double_blocks.0.img_attn.qkv.weight": (3, 1),
        "double_blocks.0.img_attn.qkv.weight.quant_state.bitsandbytes__nf4": (1,),
    },
    "Qwen-Image-Layered": {
        "txt_norm.weight": (1,),
        "transformer_blocks.0.img_mod.1.weight": (1, 1),
        "time_text_embed.addition_t_embedding.weight": (2, 1),
    },
    "a Chroma Radiance transformer": {
        "distilled_guidance_layer.in_proj.weight": (1, 1),
        "nerf_blocks.0.x": (1,),
        "double_blocks.0.img_attn.qkv.weight": (3, 1),
    },
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with all families and relatives; of each two Qwen3s the width differs, as with the real ones."""
    demo_files = files.prepare_demo(tmp_path_factory.mktemp("every"), demo_module.DEMO_VARIANTS + families.FAMILIES)
    random_anima.write_random_model(demo_files.folder / "models/anima", sizes=replace(random_anima.TINY, text=80))
    return demo_files


def slots(config):
    """The options that name a model's files, and what the demo has there."""
    model = {name for name, option in options_of(type(config)).items() if option.kind in ("file", "folder")}
    paths = {name: getattr(config.model, name, None) for name in model}
    return {name: path for name, path in paths.items() if path and str(path).endswith(".safetensors")}


def said(demo: Any, script: str, **options: Any) -> list[Any]:
    return list(families.family_for(config_of(demo, script, **options)).problems())


def plain_tensors(config: Any) -> dict[str, torch.Tensor]:
    """What a base model's file holds, without a prefix of its own."""
    tensors = load_file(config.model.pretrained_model_name_or_path)
    return {plain: tensors[name] for plain, name in tensor_names.without_prefix(tensors).items()}


def made(shapes, path):
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lora_unet_mid_block_attentions_0_proj_in.oft_diag", "a LoRA file"),
        ("lora_unet_mid_block_attentions_0_proj_in.diff", "a LoRA file"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1.on_input", "a LoRA file"),
        ("lycoris_blocks_0_attn_wq.a1.weight", "a LoRA file"),
        ("transformer.blocks.0.attn.to_q.oft_R.weight", "a LoRA file"),
        ("unet.mid_block.attentions.0.proj_in.oft_blocks", "a LoRA file"),
        ("unet.mid_block.attentions.0.proj_in.lora_magnitude_vector", "a LoRA file"),
        ("emb_params", "a textual inversion"),
        ("clip_g", "a textual inversion"),
        ("controlnet_blocks.0.weight", "a ControlNet"),
        ("controlnet_cond_embedding.conv_in.weight", "a ControlNet"),
    ],
)
def test_files_that_only_belong_to_a_model_are_recognised_by_their_names(name, words):
    assert recognition.describe_checkpoint({name: (4, 4)}) == words


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_a_base_model_is_the_same_with_every_prefix(demo, script, tmp_path):
    config = config_of(demo, script)
    if families.facts_of(config.family).saves_all_parts:
        pytest.skip("its file has text encoders beside its denoiser, and one prefix of its own")
    tensors = plain_tensors(config)
    words = recognition.describe_checkpoint(weights.header(config.model.pretrained_model_name_or_path))
    whole = families.family_for(config).load(torch.float32).denoiser.state_dict()
    beside = {"vae.x": torch.zeros(1)}
    twice = ("model.diffusion_model.net.", beside), ("module.", {}), ("module.net.", {"module.vae.x": torch.zeros(1)})
    for prefix, others in (*((prefix, beside) for prefix in tensor_names.DENOISER_PREFIXES), *twice):
        path = tmp_path / "m.safetensors"
        save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()} | others, path)
        description = recognition.recognise_file(path)
        assert (description.family, description.words) == (config.family, words)
        assert said(demo, script, **{BASE: path}) == []
        if prefix in tensor_names.DENOISER_PREFIXES[1:]:
            continue  # what is read follows from the names, which were asked above
        read = families.family_for(config_of(demo, script, **{BASE: path})).load(torch.float32)
        state = read.denoiser.state_dict()
        assert state.keys() == whole.keys() and all(torch.equal(state[name], whole[name]) for name in whole)


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_no_other_family_takes_its_files(demo, script):
    config = config_of(demo, script)
    shapes = weights.header(config.model.pretrained_model_name_or_path)
    plain = {name: shapes[key] for name, key in tensor_names.without_prefix(shapes).items()}
    own = families.facts_of(config.family)
    assert own.recognise(plain) or own.recognise(shapes)
    for other in families.all_families():
        if other is not own and not (own.recognised_first and not other.recognised_first):
            takes = other.recognise(plain) or other.recognise(shapes)
            assert not takes, f"{other.name} recognises files of {own.name}: set recognised_first in the facts of one"


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_fp8_with_scales_is_recognised_and_read(demo, script, tmp_path):
    """As ComfyUI's files have it, the older and the newer names, with their prefix."""
    config = config_of(demo, script)
    if families.facts_of(config.family).saves_all_parts:
        pytest.skip("people have no such files of it")
    tensors = plain_tensors(config)
    words = recognition.describe_checkpoint(weights.header(config.model.pretrained_model_name_or_path))
    whole = families.family_for(config).load(torch.float32).denoiser.state_dict()
    for ending in ("scale_weight", "weight_scale"):
        stored = {"scaled_fp8": torch.zeros(2)} if ending == "scale_weight" else {}
        for name, tensor in tensors.items():
            scaled = tensor.ndim == 2 and ("blocks." in name or name.startswith("layers."))
            scale = tensor.float().abs().max() / 448 if scaled else torch.ones(())
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn) if scaled else tensor
            stored |= {f"{name.removesuffix('weight')}{ending}": scale.float()} if scaled else {}
        path = tmp_path / f"{ending}.safetensors"
        save_file({f"model.diffusion_model.{name}": tensor for name, tensor in stored.items()}, path)
        description = recognition.recognise_file(path)
        assert (description.family, description.words) == (config.family, words) and said(
            demo, script, **{BASE: path}
        ) == []
        read = families.family_for(config_of(demo, script, **{BASE: path})).load(torch.float32).denoiser.state_dict()
        for name, tensor in whole.items():
            assert (read[name] - tensor).norm() <= 0.06 * tensor.norm(), name


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_a_model_in_pieces_is_recognised_and_its_index_may_be_damaged(demo, script, tmp_path):
    path = Path(config_of(demo, script).model.pretrained_model_name_or_path)
    tensors = load_file(path)
    if any(name.startswith(tensor_names.DENOISER_PREFIXES[:1]) for name in tensors):
        pytest.skip("its file holds all networks, and is in one piece")
    stem = "diffusion_pytorch_model"
    pieces = {f"{stem}-0000{n}-of-00002.safetensors": list(tensors)[n - 1 :: 2] for n in (1, 2)}
    for name, own in pieces.items():
        save_file({key: tensors[key] for key in own}, tmp_path / name)
    index = tmp_path / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: name for name, own in pieces.items() for key in own}}))
    for place in (tmp_path, index, *(tmp_path / name for name in pieces)):
        assert (
            recognition.recognise_file(place) == recognition.recognise_file(path)
            and said(demo, script, **{BASE: place}) == []
        )
    for text in ("", "[]", '{"weight_map": {}}'):
        index.write_text(text)
        (problem,) = said(demo, script, **{BASE: tmp_path})
        assert problem.option == BASE and "download it again" in str(problem)


def test_a_part_of_a_file_is_taken_for_no_other_model(demo):
    """Where the tensors are missing that whole files are recognised by."""
    for script, ours, kind in (
        ("flux_2_train_network", "a FLUX.2 transformer", ("double_blocks.", "single_blocks.", "img_in.")),
        ("anima_train_network", "an Anima transformer", ("llm_adapter.", "x_embedder.")),
        ("anima_train_network", "an Anima transformer", ("llm_adapter.", "blocks.1.")),
        ("anima_train_network", "a text adapter of Anima", ("llm_adapter.",)),
    ):
        shapes = weights.header(config_of(demo, script).model.pretrained_model_name_or_path)
        part = {name: shape for name, shape in shapes.items() if name.removeprefix("net.").startswith(kind)}
        assert part and recognition.describe_checkpoint(part) == ours
    assert tensor_names.denoiser_prefix(["blocks.0.a", "blocks.0.b"]) == ""  # a list of blocks is no prefix


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_each_half_of_a_file_is_of_its_family_and_not_complete(demo, script, tmp_path):
    """Also where the half lacks what whole files are recognised by."""
    config = config_of(demo, script)
    shapes = weights.header(config.model.pretrained_model_name_or_path)
    names = sorted(shapes, key=lambda name: [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)])
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        path = made({name: shapes[name] for name in half}, tmp_path / "half.safetensors")
        facts, description = recognition.family_and_description(weights.header(path))
        is_own = facts is families.facts_of(config.family) or description == "a Cosmos-Predict2 transformer"
        assert is_own, f"half of the file is {description}: recognise it by tensors that both halves have"
        (problem,) = said(demo, script, **{BASE: path})
        told = ("is not complete: ", "has no text encoders", "has no text adapter")
        assert any(sentence in str(problem) for sentence in told), problem


def test_later_blocks_of_diffusers_layout_tell_the_model():
    single = "single_transformer_blocks.7."
    chroma = {f"{single}proj_mlp.weight": (16, 4), f"{single}attn.to_q.weight": (4, 4)}
    flux = chroma | {f"{single}norm.linear.weight": (12, 4)}
    for shapes, words in ((chroma, "a Chroma transformer"), (flux, "a FLUX.1 transformer")):
        assert recognition.describe_checkpoint(shapes) == f"{words} in the diffusers layout"
    video = {"single_blocks.7.linear1.weight": (28, 4), "single_blocks.7.modulation.linear.weight": (12, 4)}
    assert recognition.family_and_description(video)[0] is None


def test_a_file_of_all_networks_is_read_under_a_prefix_of_its_own(demo, tmp_path):
    """As programs write it that wrap the whole model; its tokenizers lie beside it."""
    config = config_of(demo, "sdxl_train_network")
    base = Path(config.model.pretrained_model_name_or_path)
    tensors, path = load_file(base), base.parent / "wrapped.safetensors"
    tensors["conditioner.embedders.1.model.logit_scale"] = torch.ones(())
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, path)
    assert recognition.recognise_file(path) == recognition.recognise_file(base)
    assert said(demo, "sdxl_train_network", **{BASE: path}) == []
    whole, read = (
        families.family_for(config_of(demo, "sdxl_train_network", **{BASE: file})).load(torch.float32)
        for file in (base, path)
    )
    state, wanted = read.denoiser.state_dict(), whole.denoiser.state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert "conditioner.embedders.1.model.logit_scale" in read.source["rest"]
    alone = {
        name.removeprefix("model.diffusion_model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.diffusion_model.")
    }
    save_file(alone, path)
    (problem,) = said(demo, "sdxl_train_network", **{BASE: path})
    assert "has no text encoders" in str(problem)
    vae = {
        f"any.{name.removeprefix('first_stage_model.')}": tensor
        for name, tensor in tensors.items()
        if name.startswith("first_stage_model.")
    }
    save_file(vae, tmp_path / "vae.safetensors")
    assert said(demo, "sdxl_train_network", vae=tmp_path / "vae.safetensors") == []
    path.unlink()


def test_files_of_4_bits_with_scales_are_no_fp8_files(tmp_path):
    kinds = {"a.weight": "U8", "a.weight_scale": "F8_E4M3", "a.comfy_quant": "U8"}
    entries = {name: {"dtype": kind, "shape": [1]} for name, kind in kinds.items()}
    assert "4 bits" in str(scaled_weights.stored_oddly(tmp_path, entries, scaled=True))


def test_a_diffusers_folder_says_its_family_and_what_training_it_needs(tmp_path):
    for facts in families.all_families():
        for pipeline in facts.pipelines:
            (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="utf-8")
            description = recognition.recognise_file(tmp_path)
            assert description.family == facts.name and pipeline in str(description.words)
            assert dict(description.options) == dict(facts.model_options.get(pipeline, {}))
            (tmp_path / "transformer").mkdir(exist_ok=True)
            assert recognition.recognise_file(tmp_path / "transformer") == description
            build_config(families.config_class(families.lora_script(facts.name)), dict(description.options), notes=[])


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_a_model_that_is_not_trained_is_named_in_a_sentence(demo, script, tmp_path):
    for words, shapes in UNTRAINED.items():
        for prefix in ("", "model.diffusion_model.", "net."):
            path = made({f"{prefix}{name}": shape for name, shape in shapes.items()}, tmp_path / "m.safetensors")
            assert recognition.recognise_file(path)[:2] == ("", words), prefix
            (problem,) = said(demo, script, **{BASE: path})
            name = words.removeprefix("a ").removesuffix(" transformer")
            assert problem.option == BASE and name in str(problem) and "\n" not in str(problem)


@pytest.fixture(scope="module")
def every_file(demo, tmp_path_factory):
    """The files of all models, and what is in them: path -> names and shapes, and what it is in words."""
    folder = tmp_path_factory.mktemp("others")
    others = {
        str(path): weights.header(path)
        for script in [*LORAS, *RELATIVES]
        for path in slots(config_of(demo, script)).values()
    }
    for path in list(others):  # the VAE of video models, in the layout of diffusers
        if recognition.describe_checkpoint(others[path]) == "a Qwen-Image VAE":
            from library.families.shared import qwen_vae_names

            tensors = load_file(path)
            named = {plain: tensors[name] for plain, name in qwen_vae_names.plain_qwen_vae_names(tensors).items()}
            save_file(named, folder / "wan_vae.safetensors")
            others[str(folder / "wan_vae.safetensors")] = {name: tuple(t.shape) for name, t in named.items()}
    clip = next(path for path in others if recognition.describe_checkpoint(others[path]) == "a CLIP text encoder")
    named = {name.removeprefix("text_model."): tensor for name, tensor in load_file(clip).items()}
    save_file(named, folder / "clip.safetensors")  # as transformers 5 writes it
    others[str(folder / "clip.safetensors")] = {name: tuple(t.shape) for name, t in named.items()}
    qwen3 = {
        "model.embed_tokens.weight": (2, 2),
        "model.layers.0.self_attn.q_norm.weight": (2,),
        "model.layers.0.self_attn.q_proj.weight": (2, 2),
    }
    others[str(made(qwen3, folder / "qwen3.safetensors"))] = qwen3
    return {path: (shapes, recognition.describe_checkpoint(shapes)) for path, shapes in others.items()}


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_a_file_of_another_model_is_named_in_every_slot(demo, every_file, script, tmp_path):
    config = config_of(demo, script)
    cut = tmp_path / "cut.safetensors"
    wrong = []
    for option, own in slots(config).items():
        header = weights.header(own)
        own_words = recognition.describe_checkpoint(header)
        for path, (shapes, words) in every_file.items():
            # Another layout of it; a text encoder that can do more; a model that only its option tells apart.
            same = shapes == header or (
                words == own_words
                and (
                    words in ("a Qwen-Image VAE", "a CLIP text encoder")
                    or (words == "a Qwen2.5-VL text encoder" and header.keys() < shapes.keys())
                )
            )
            same = same or {n: s for n, s in shapes.items() if 0 not in s} == {
                n: s for n, s in header.items() if 0 not in s
            }
            problems = [] if same else said(demo, script, **{option: path})
            if not same and not (
                len(problems) == 1
                and {option, "model_type", "model_version"} & {problems[0].option}
                and "\n" not in str(problems[0])
            ):
                wrong.append((option, words, [str(text) for text in problems]))
        with open(own, "rb") as file:
            cut.write_bytes(file.read()[:-50])
        (problem,) = said(demo, script, **{option: cut})
        assert problem.option == option and "was cut short" in str(problem)
    assert wrong == []


@pytest.mark.parametrize("script", [*LORAS, *RELATIVES])
def test_a_part_that_is_not_whole_says_what_is_missing_and_unknown_tensors_are_no_harm(demo, script, tmp_path):
    config = config_of(demo, script)
    if families.facts_of(config.family).saves_all_parts:
        pytest.skip("its file holds all networks")
    for option, own in slots(config).items():
        tensors = {name: torch.empty(shape) for name, shape in weights.header(own).items()}
        path, repeated = (
            tmp_path / f"{option}.safetensors",
            [n for n in tensors if re.search(r"(blocks?|layers)\.1\.", n)],
        )
        tensors.pop((repeated or list(tensors))[-1])  # of a block or layer that is not the first, whose tell the sizes
        save_file(tensors, path)
        (problem,) = said(demo, script, **{option: path})
        assert (
            problem.option == option
            and "is not complete: it lacks 1 of its " in str(problem)
            and path.name in str(problem)
        )
        if option != BASE:
            whole = {f"any.{name}": torch.empty(shape) for name, shape in weights.header(own).items()}
            matrix = next(name for name, tensor in whole.items() if tensor.ndim == 2 or option not in ENCODERS)
            scale = {f"{matrix.removesuffix('weight')}scale_weight": torch.ones(())} if option in ENCODERS else {}
            save_file({**whole, **scale, "loss.logvar": torch.zeros(1)}, path)
            assert said(demo, script, **{option: path}) == []
