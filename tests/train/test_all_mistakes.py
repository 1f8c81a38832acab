"""Everything that is wrong is named at once, whatever it is: flags, files, data sets, packages, this machine."""

import contextlib
import io
import json
import os
import shutil
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from library.check import answering, check_process
from library.cli import check as looking
from tests import fork_server
from tests.source import ROOT
from tests.training import pictures

NAME = "flux_train_network"
# What hides other mistakes by nature: nothing can be known of what it should have said.
HIDING = {
    "a config that is no TOML": "learning_rate = = 1\n",
    "a config of another trainer": "{",
}
# Kind -> what is set (by option; "LAUNCH" by the launcher), and words of the one sentence that names it.
KINDS = {
    # names and values of flags and TOML
    "a misspelt option": ({"lerning_rat": "1"}, "lerning_rat"),
    "an unknown option": ({"foobar": "1"}, "foobar is not an option"),
    "an option of another script": ({"block_lr": "1"}, "block_lr"),
    "text for a whole number": ({"seed": "x"}, "seed must be a whole number"),
    "text for a rate": ({"unet_lr": "fast"}, "unet_lr must be a number"),
    "no truth value": ({"flip_aug": "perhaps"}, "flip_aug must be true or false"),
    "an unknown choice": ({"loss_type": "l3"}, "loss_type must be one of"),
    "another unknown choice": ({"save_precision": "fp64"}, "save_precision must be one of"),
    "below its least": ({"network_dim": "-3"}, "network_dim must be at least 1"),
    "above its most": ({"caption_dropout_rate": "1.5"}, "caption_dropout_rate must be at least 0"),
    "steps without end": ({"max_train_steps": 10**20}, "max_train_steps must be at most"),
    "a batch that no GPU holds": ({"train_batch_size": 10**9}, "train_batch_size must be at most"),
    "a picture as large as a town": ({"resolution": "1000000"}, "resolution must be at most"),
    "no number at all": ({"max_grad_norm": "nan"}, "max_grad_norm must be a number"),
    "too many workers' minutes": ({"ddp_timeout": 10**15}, "ddp_timeout must be at most"),
    "a pair that is none": ({"base_weights_multiplier": "1"}, "base_weights_multiplier has 1 value"),
    # rules across options
    "half precision without its type": ({"full_bf16": "true", "mixed_precision": "no"}, "full_bf16 needs"),
    "noise of noise": ({"adaptive_noise_scale": "0.1"}, "adaptive_noise_scale needs noise_offset"),
    "timesteps the wrong way": ({"min_timestep": 800, "max_timestep": 200}, "min_timestep (800)"),
    "opposite wishes": ({"lowram": "true", "highvram": "true"}, "lowram and highvram"),
    "two ways of sparing": (
        {"checkpoint_keep_attention": "true", "cpu_offload_checkpointing": "true"},
        "checkpoint_keep_attention and cpu_off",
    ),
    "states to nowhere": ({"save_state_to_huggingface": "true"}, "save_state_to_huggingface needs"),
    "ranks of no file": ({"dim_from_weights": "true"}, "dim_from_weights needs network_weights"),
    "SD 2": ({"v2": "true"}, "v2 must be off"),
    "a relative that is none": ({"model_type": "flux2"}, "model_type must be one of"),
    # models and other files
    "no model": ({"pretrained_model_name_or_path": "GONE/m.safetensors"}, "pretrained_model_name_or_path: "),
    "no text encoder": ({"clip_l": "GONE/c.safetensors"}, "clip_l: "),
    "text for a text encoder": ({"t5xxl": "WRONG/text.safetensors"}, "t5xxl: "),
    "a LoRA for an autoencoder": ({"ae": "WRONG/lora.safetensors"}, "ae: "),
    "no LoRA to continue with": ({"network_weights": "GONE/lora.safetensors"}, "network_weights: "),
    "no prompts": ({"sample_prompts": "GONE/p.txt"}, "sample_prompts: "),
    "no state": ({"resume": "GONE/x-state"}, "resume: there is no folder"),
    "no tracker's settings": ({"log_tracker_config": "GONE/t.toml"}, "log_tracker_config: "),
    "a file for a folder": ({"output_dir": "WRONG/text.safetensors"}, "output_dir: "),
    "a name with folders": ({"output_name": "a/b"}, "output_name must be a plain name"),
    # packages, arguments, this machine
    "no such package": ({"optimizer_type": "nopackage.Optimizer"}, "optimizer_type nopackage.Optimizer"),
    "no argument of it": ({"optimizer_args": "weight_dekay=1"}, "weight_dekay"),
    "no schedule": ({"lr_scheduler": "cosin"}, "lr_scheduler cosin"),
    "no argument of the adapter": ({"network_args": "conv=1"}, "conv"),
    "no backend": ({"compile": "true", "compile_backend": "inducter"}, "compile_backend: PyTorch has no backend"),
    "no kind of repository": ({"huggingface_repo_type": "x"}, "huggingface_repo_type must be model"),
    "processes by name": ({"LAUNCH num_processes": "two"}, "num_processes must be a whole number"),
    "a port that is none": ({"LAUNCH main_process_port": 70000}, "main_process_port must be at most"),
    "a rank of no machine": ({"LAUNCH machine_rank": 3}, "machine_rank must be below"),
    "an adapter of no kind": ({"network_module": "lycoris.kohya", "network_args": "algo=abba"}, "algo must be one of"),
    "an unknown argument of it": ({"network_module": "lycoris.kohya", "network_args": "conf=1"}, "conf is not a known"),
    "layers by no name": (
        {"network_module": "lycoris.kohya", "network_args": "preset=ful"},
        "preset 'ful' is neither a file",
    ),
    "a rank of no layer": ({"network_args": "single_dim=99999999"}, "single_dim must be at most"),
    "all dropped": ({"network_dropout": "1"}, "network_dropout must be below 1"),
    "a strength without end": ({"network_alpha": "1e30"}, "network_alpha must be at most"),
    "nothing that learns": ({"unet_lr": 0, "network_train_unet_only": "true"}, "unet_lr is 0, so nothing would be"),
    "no argument of the launcher": ({"LAUNCH extra_accelerate_launch_args": "--num_proceses=2"}, "no option --nu"),
    "GPUs that are not there": ({"LAUNCH gpu_ids": "7"}, "there is no GPU 7 here"),
    # states and adapters that do not go with the rest
    "ranks of another file": ({"network_weights": "WRONG/rank.safetensors"}, "has rank 2 in the file and 8 here"),
    "adapters of no layer here": ({"base_weights": "WRONG/layer.safetensors"}, "base_weights: nothing in"),
    "adapters of SDXL": ({"network_weights": "WRONG/sdxl.safetensors"}, "was made for SDXL"),
    "a state of another rank": ({"resume": "WRONG/rank-state"}, "was saved with network_dim 2, and this is 8"),
    "a state of another optimizer": ({"resume": "WRONG/optimizer-state"}, "was saved with optimizer_type Lion"),
    "a state of a whole model": ({"resume": "WRONG/whole-state"}, "is the state of a training of a whole model"),
    # data
    "a folder seen for ever": ({"train_data_dir": "WRONG/often"}, "asks for 999,999,999 repeats"),
    "a picture cut off": ({"train_data_dir": "WRONG/torn"}, "cannot be decoded"),
    "no picture at all": ({"train_data_dir": "WRONG/fake"}, "cannot be read as images"),
    "no images": ({"train_data_dir": "GONE/images"}, "train_data_dir: "),
    "no regularisation": ({"reg_data_dir": "GONE/reg"}, "reg_data_dir: "),
    "a misspelt key of a data set": ({"dataset_config": "WRONG/key.toml", "train_data_dir": ""}, "repeets"),
    "a value of a data set": ({"dataset_config": "WRONG/value.toml", "train_data_dir": ""}, "batch_size must be"),
    "no folder of a data set": ({"dataset_config": "WRONG/folder.toml", "train_data_dir": ""}, "image folder"),
}
# Not together, though they set different options: one of them takes away what the other is about.
APART = [
    {"no argument of it", "no such package"},
    {"ranks of no file", "no LoRA to continue with"},
    {"a pair that is none", "ranks of no file"},
    {"ranks of another file", "ranks of no file"},
    {"adapters of SDXL", "ranks of no file"},
    {"below its least", "ranks of another file"},
    {"below its least", "a state of another rank"},
    {"below its least", "a state of another optimizer"},
    {"a rank of no layer", "ranks of another file"},
    {"a file for a folder", "a name with folders"},
    {"a pair that is none", "adapters of no layer here"},
    {"ranks of no file", "a state of another rank"},
    # which ranks there are is said by arguments of the adapter
    *(
        {rank, why}
        for rank in ("a state of another rank", "ranks of another file")
        for why in ("an adapter of no kind", "an unknown argument of it", "layers by no name")
    ),
    # where a dataset file says which images there are, reg_data_dir is not read
    *(
        {"no regularisation", why}
        for why in ("a misspelt key of a data set", "a value of a data set", "no folder of a data set")
    ),
]


# Which layers there are is not known while files of the model, or arguments about its layers, are wrong.
NEEDS_MODEL = {"adapters of no layer here"}
LAYERS = {
    "pretrained_model_name_or_path",
    "clip_l",
    "t5xxl",
    "ae",
    "model_type",
    "network_args",
    "network_module",
    "network_weights",
    "network_dim",
    "dim_from_weights",
}


def states(folder):
    """Files of adapters and folders of states that fit something else."""
    name = "lora_unet_double_blocks_0_img_attn_proj"
    small = {f"{name}.lora_down.weight": torch.ones(2, 8), f"{name}.lora_up.weight": torch.ones(8, 2)}
    save_file(small, folder / "rank.safetensors")
    save_file({n.replace("blocks_0", "blocks_70"): t for n, t in small.items()}, folder / "layer.safetensors")
    save_file({"lora_unet_input_blocks_4_1_proj_in.lora_down.weight": torch.ones(2, 8)}, folder / "sdxl.safetensors")
    whole = {"denoiser.double_blocks.0.img_attn.proj.weight": torch.ones(2, 2)}
    saved = {
        "rank": (small, {"network_dim": 2}),
        "optimizer": (small, {"optimizer_type": "Lion", "network_dim": 8}),
        "whole": (whole, {}),
    }
    for kind, (tensors, said) in saved.items():
        (place := folder / f"{kind}-state").mkdir()
        save_file(tensors, place / "model.safetensors")
        torch.save({}, place / "optimizer.bin")
        torch.save({}, place / "scheduler.bin")
        torch.save({}, place / "random_states_0.bin")
        facts = {"version": 1, "current_step": 1, "current_epoch": 1, "seed": 1, "settings": said}
        facts |= {"losses": [], "batches": {"epoch": 0, "index": 1, "seed": 1}}
        (place / "train_state.json").write_text(json.dumps(facts))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.fixture(scope="module")
def world(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    states(folder)
    pictures(folder / "pictures")
    shutil.copytree(folder / "pictures" / "2_zorb toy", folder / "often" / "999999999_zorb toy")
    good = pictures(folder / "good")
    for name, content in (("torn", None), ("fake", b"<html>not found</html>")):
        first = sorted(pictures(folder / name).rglob("*.png"))[0]
        first.write_bytes(content or first.read_bytes()[:200])
    (folder / "text.safetensors").write_text("not a model")
    save_file({"lora_unet_nowhere.lora_down.weight": torch.ones(4, 8)}, folder / "lora.safetensors")
    images = (good / "2_zorb toy").as_posix()
    head = "[[datasets]]\nresolution = 64\n"
    for name, text in (
        ("key", f"{head}[[datasets.subsets]]\nimage_dir = '{images}'\nrepeets = 3\n"),
        ("value", f"{head}batch_size = 0\n[[datasets.subsets]]\nimage_dir = '{images}'\n"),
        ("folder", f"{head}[[datasets.subsets]]\nimage_dir = '{(folder / 'gone').as_posix()}'\n"),
    ):
        (folder / f"{name}.toml").write_text(text)
    base = folder / f"{NAME}.toml"
    shutil.copy(demo.configs[NAME], base)
    right = {
        "resolution": "64",
        "train_data_dir": str(good),
        "compile": "false",
        "logging_dir": "",
        "output_dir": str(folder / "out"),
        "compile_blocks": "",
        "caption_extension": ".txt",
    }
    return folder, base, right


def line(world, kinds):
    """The command line of a config with these mistakes in it, and the words that have to be named."""
    folder, base, right = world
    chosen, launch, words = dict(right), [], []
    for kind in kinds:
        values, named = KINDS[kind]
        words.append(named)
        for option, value in values.items():
            text = str(value).replace("WRONG", str(folder)).replace("GONE", str(folder / "gone"))
            if option.startswith("LAUNCH "):
                launch.append(f"--{option.removeprefix('LAUNCH ')}={text}")
            else:
                chosen[option] = text
    return [*(f"--{name}={value}" for name, value in chosen.items())], launch, words


def check(world, kinds):
    flags, launch, words = line(world, kinds)
    _, reading, _ = looking.read_check_request([str(world[1]), *flags, *launch])
    return [*map(str, looking.make_check_report(reading).problems)], words


def named_all(said, words, kinds):
    for word, kind in zip(words, kinds, strict=True):
        assert any(word in text for text in said), (kind, word, said)
    assert len(said) == len(set(said)), said


def fit_together(kinds):
    options = [option for kind in kinds for option in KINDS[kind][0]]
    together = set(kinds)
    if together & NEEDS_MODEL and LAYERS.intersection(options):
        return False
    return len(options) == len(set(options)) and not any(pair <= together for pair in APART)


def test_there_are_many_kinds():
    assert len(KINDS) >= 40


def test_a_right_config_has_none(world):
    assert check(world, []) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
def test_one_mistake_is_named_once(world, kind):
    said, words = check(world, [kind])
    assert len(said) == 1 and words[0] in str(said[0]), said


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=10, unique=True).filter(fit_together))
def test_every_one_of_several_is_named(world, kinds):
    said, words = check(world, kinds)
    named_all(said, words, kinds)
    assert len(said) <= len(kinds), (kinds, said)  # and nothing that only follows from one of them


FEW = [
    "a misspelt option",
    "text for a whole number",
    "below its least",
    "opposite wishes",
    "no text encoder",
    "no such package",
    "no state",
    "a picture cut off",
    "a name with folders",
]


def test_the_script_itself_names_them_all(world):
    flags, _, words = line(world, FEW)
    process = fork_server.start([str(ROOT / "sd-scripts" / f"{NAME}.py"), "--config_file", str(world[1]), *flags])
    said = process.communicate()[0]
    assert process.returncode == 2 and "Traceback" not in said
    named_all([text for text in said.splitlines() if text.startswith("error: ")], words, FEW)


def answered(requests, launch):
    """What the process of a check answers, from this one; that it is one of its own: page/test_desk.py."""
    question = check_process.question_of(requests, launch)
    stdin = mock.patch.object(sys, "stdin", io.StringIO(question))
    with mock.patch.dict(os.environ), stdin, contextlib.redirect_stdout(io.StringIO()) as said:
        answering.answer_requests()
    return 0, said.getvalue(), ""


def test_the_page_names_them_all(world, monkeypatch):
    from kohya_gui.form.tab import TrainingTab
    from kohya_gui.form.tabs import TABS
    from library.config.outside_files import load_toml
    from library.config.schema import flatten_sections

    tab = TrainingTab(TABS[0], [world[0].parents[1], ROOT])
    monkeypatch.setattr(check_process, "run_checks", answered)
    kinds = [*FEW, "processes by name"]
    flags, launch, words = line(world, kinds)
    values = {flag[2:].partition("=")[0]: flag.partition("=")[2] for flag in flags}
    given_ = {**flatten_sections(load_toml(world[1])), **values}
    sent = {"family": "flux", "values": given_, "launch": {"num_processes": launch[0].partition("=")[2]}}
    answer = tab.check_form(json.dumps(sent))[-1]
    named_all([finding["text"] for finding in answer["findings"] if finding["verdict"] == "bad"], words, kinds)


@pytest.mark.parametrize("kind", HIDING)
def test_what_hides_others_is_named_with_the_flags_beside_it(world, tmp_path, kind):
    path = tmp_path / "run.toml"
    path.write_text(HIDING[kind])
    _, reading, _ = looking.read_check_request([str(path), "--script", NAME, "--seed", "x"])
    said = [*map(str, looking.make_check_report(reading).problems)]
    assert len(said) == 2 and "run.toml is not valid TOML" in " ".join(said) and "--seed must be" in " ".join(said)


@pytest.mark.parametrize("family", ["sdxl_train_network", "flux_train_network"])
def test_an_absurd_rank_does_not_fit_and_is_legal_with_lycoris(family):
    from library.check import estimate
    from library.check import report as checking
    from library.config.building import build_config
    from library.families import config_class

    rank = {"network_dim": 100_000, "mixed_precision": "bf16"}
    lokr = {**rank, "network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}
    for values, verdict in ((rank, "bad"), (lokr, "ok")):
        config = build_config(config_class(family), values, notes=[])
        (finding,) = checking._check_memory(estimate.estimate(config, (512, 512)), config)
        assert finding.verdict == verdict, finding
