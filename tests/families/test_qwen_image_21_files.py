"""Qwen-Image-2.1's files: every layout is read, what is something else is named, LoRA are known elsewhere, and
trainings with reference images."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.adapter_files import names, verify
from library.demo import summary
from library.families import recognition
from library.families.krea_2 import random as random_krea
from library.families.qwen_image import random as random_qwen
from library.families.qwen_image_21 import random
from library.families.qwen_image_21.facts import FACTS
from library.families.qwen_image_21.keys import LORA_NAMES, qwen_21_to_single
from library.methods.lora_files import by_name, file_of
from library.tools import convert, merge
from tests import links
from tests.compile.test_captions_of_any_length import GRID, losses_and_graphs, references, written
from tests.families import alike
from tests.families.test_qwen_image_21_model import family
from tests.training import config_of, train

SCRIPT = "qwen_image_21_train_network"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("qwen_image_21"), dtype=torch.float32)


def saved(tensors, path):
    save_file(tensors, path)
    return path


def change_of(parts):
    """What a plain LoRA adds to a weight."""
    down = parts["lora_down.weight"]
    return parts["lora_up.weight"] @ down * (parts["alpha"] / down.shape[0])


def said(files, values=None, **other):
    return [str(problem) for problem in family(files | other, **values or {}).problems()]


def test_a_folder_of_diffusers_has_all_parts_in_its_own_layout_and_its_index_tells_turbo(files, tmp_path):
    whole = family(files).load(torch.float32)
    encoder = whole.encoders["text_encoder"].state_dict().items()
    stored = {
        "transformer": whole.denoiser.state_dict(),
        "vae": whole.vae.network.state_dict(),
        "text_encoder": {f"model.{name.replace('language.', 'language_model.')}": tensor for name, tensor in encoder}
        | {"model.language_model.norm.weight": torch.ones(64)},
    }
    for part, tensors in stored.items():
        (tmp_path / part).mkdir()
        saved({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / part / "model.safetensors")
    links.link_or_copy(tmp_path / "tokenizer", files["tokenizer"])
    folder = {"qwen_image_21": tmp_path, "text_encoder": None, "vae": None}
    for steps, version, is_wrong in ((None, None, False), ([1.0, 0.5], None, True), ([1.0, 0.5], "turbo", False)):
        index = {"_class_name": "QwenImage21Pipeline", "sample_sigmas": steps}
        (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        problems = said(files, {"model_version": version}, **folder)
        assert [("seems to be Turbo" in problem) for problem in problems] == [True] * is_wrong, problems
    assert recognition.recognise_file(tmp_path)[0] == "qwen_image_21"
    parts = family(files | folder).load(torch.float32)
    for ours, other in ((whole.denoiser, parts.denoiser), (whole.vae, parts.vae)):
        other_state = other.state_dict()
        assert all(torch.equal(tensor, other_state[name]) for name, tensor in ours.state_dict().items())
    assert parts.encoders["text_encoder"].state_dict().keys() == whole.encoders["text_encoder"].state_dict().keys()


def test_the_version_and_the_assistant_are_asked_for(files, tmp_path):
    turbo = saved(load_file(files["qwen_image_21"]), tmp_path / "qwen_image_2.1_turbo_bf16.safetensors")
    (problem,) = said(files, {"model_version": None}, qwen_image_21=turbo)
    assert "seems to be Turbo, whose files look the same: set model_version = turbo" in problem
    first, alone = map(str, family(files, model_version=None).notes())
    assert "trained as Qwen-Image-2.1; files of Turbo look the same" in first and FACTS.assistant_loras[0].file in alone
    assert list(family(files, base_weights=["assistant.safetensors"]).notes()) == []
    (note,) = family(files, model_version="turbo", base_weights=["assistant.safetensors"]).notes()
    assert "forgets how to generate in few steps" in str(note)


def test_what_does_not_fit_is_reported_in_one_sentence_before_loading(files, tmp_path):
    """Among others the Qwen3-VL of another model, which differs in its width alone."""
    qwen, krea = (made.write_random_model(tmp_path / made.__name__) for made in (random_qwen, random_krea))
    narrow = random.write_random_model(tmp_path / "narrow", sizes=replace(random.TINY, text=32))
    half = load_file(files["qwen_image_21"])
    half = {name: tensor for name, tensor in half.items() if "transformer_blocks.1.attn" not in name}
    vae = {name: tensor for name, tensor in load_file(files["vae"]).items() if "decoder.middle" not in name}
    cases = [
        ({"qwen_image_21": qwen["qwen_image"]}, "is a Qwen-Image transformer; train it with qwen_image_train_network"),
        ({"qwen_image_21": files["vae"]}, "is a Qwen-Image-2.1 VAE; expected a Qwen-Image-2.1 transformer"),
        ({"qwen_image_21": saved(half, tmp_path / "half.safetensors")}, "that is not complete: it lacks 6 of"),
        ({"vae": qwen["vae"]}, "is a Qwen-Image VAE; expected the Qwen-Image-2.1 VAE"),
        ({"vae": saved(vae, tmp_path / "vae.safetensors")}, "is a Qwen-Image-2.1 VAE that is not complete"),
        ({"text_encoder": krea["text_encoder"]}, "is a Qwen3-VL text encoder that is not complete"),
        ({"text_encoder": qwen["text_encoder"]}, "is a Qwen2.5-VL text encoder; expected the Qwen3-VL-8B"),
        ({"text_encoder": narrow["text_encoder"]}, "has 32 channels where this model expects 64"),
    ]
    alike.assert_one_problem_each(cases, lambda paths: said(files, **paths))


@pytest.fixture(scope="module")
def learnt(demo, tmp_path_factory):
    """A training with two reference images, of images of two sizes, one of them with a long caption; compiled, too."""
    folder = tmp_path_factory.mktemp("learnt")
    written(folder / "set" / "1_zorb toy", [(64, 64), (64, 128), (128, 64)])
    options = {"train_data_dir": folder / "set", "max_train_steps": 3, "train_batch_size": 1, "enable_bucket": True}
    options |= {**GRID, "cache_text_encoder_outputs": True, "compile_blocks": "block:all"}
    options["control_directory"] = references(folder / "set", folder)
    return folder, options, losses_and_graphs(demo, SCRIPT, folder, options, "eager")


def test_references_need_one_graph_over_sizes_and_lengths_and_no_other(learnt):
    told = learnt[2]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0 and told["num_graphs"] == 1


@pytest.fixture(scope="module")
def sampled(demo, learnt):
    """The folder of a training that adapts all layers, caches on the disk, and samples with a reference and without."""
    folder, options, _ = learnt
    lines = ["a red circle --w 64 --h 64 --s 2 --d 1", ""]
    picture = next((folder / "set").rglob("*.png"))
    lines[1] = f"{lines[0]} --ci {picture}"
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(lines), encoding="utf-8")
    disk = {"cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True, "compile_blocks": None}
    disk |= {"sample_prompts": prompts, "sample_every_n_steps": 3, "output_dir": folder / "sampled"}
    assert train(config_of(demo, SCRIPT, **options | disk)).losses
    return folder / "sampled"


def test_a_preview_with_a_reference_differs_from_one_without_and_caches_hold_the_words_alone(learnt, sampled):
    samples = sorted(sampled.rglob("sample/*.png"))
    assert len(samples) == 2 and len({sample.read_bytes() for sample in samples}) == 2
    caches = sorted((learnt[0] / "set").rglob("*_q21_te.safetensors"))
    with safe_open(caches[0], "pt") as file:
        (key,) = file.keys()
        assert file.get_tensor(key).shape[0] < 64 and file.get_tensor(key).shape[1] == 64
    assert len(caches) == 3


def test_a_lora_file_is_loaded_whole_by_diffusers_and_read_back(demo, sampled, tmp_path):
    from diffusers.loaders import QwenImageLoraLoaderMixin

    plain = next(sampled.glob("*.safetensors"))
    tensors = load_file(plain)
    with safe_open(plain, "pt") as file:
        assert file.metadata()["ss_base_model_version"] == "qwen_image_21"
    layers = {name.removesuffix(".lora_down.weight") for name in tensors if name.endswith(".lora_down.weight")}
    assert len(layers) == 3 * 7 and "transformer_blocks.0.img_mlp.gate_layer" in layers
    loaded = QwenImageLoraLoaderMixin.lora_state_dict(dict(tensors))
    assert {n.removesuffix(".lora_A.weight") for n in loaded if "lora_A" in n} == {f"transformer.{n}" for n in layers}
    assert summary.check_lora_layers(plain, config_of(demo, SCRIPT)) == (len(layers), [])
    stored = by_name(file_of(plain, "qwen_image_21"))
    for to in ("diffusers", "kohya", "comfy"):
        path = convert.convert_lora(plain, tmp_path / f"{to}.safetensors", to=to)
        there = by_name(file_of(path, "qwen_image_21"))
        assert there.keys() == stored.keys()
        torch.testing.assert_close(change_of(there[min(there)]), change_of(stored[min(stored)]))
        layers_there = [key.rpartition(".lora_")[0] for key in load_file(path) if ".lora_" in key]
        assert names.find_lora_family(layers_there, {}) == "qwen_image_21"
    base = demo.models["qwen_image_21"]["qwen_image_21"]
    done = merge.merge_into_checkpoint(base, [(plain, 1.0)], tmp_path / "merged.safetensors", dtype="float")
    assert done.modules == len(layers) and not verify.verify_lora(plain, base).problems
    name = "transformer_blocks.1.img_mlp.gate_up.weight"
    change = load_file(done.path)[name] - load_file(base)[name].float()
    halves = [stored[f"lora_unet_transformer_blocks_1_img_mlp_{half}"] for half in ("gate_layer", "proj")]
    torch.testing.assert_close(change, torch.cat([change_of(half) for half in halves]), rtol=1e-3, atol=1e-6)


def test_a_full_model_has_224_layers_in_its_blocks():
    tensors = qwen_21_to_single(random.make_networks(random.FULL).denoiser().state_dict())
    stored = {f"model.diffusion_model.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    assert len([*LORA_NAMES.layers(stored, convolutions=False)]) == 32 * 7
    assert recognition.describe_checkpoint(stored) == "a Qwen-Image-2.1 transformer"
