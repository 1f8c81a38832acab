"""A LoRA for samples leaves a training as if it had never been there, however the training keeps its weights."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from library import families
from library.config.building import draft
from library.config.schema import option_values, options_of
from library.methods import find_method_problems, targets
from library.sampling import few_steps
from library.train.evaluation import samples
from tests.sampling.test_sampling import lora_file
from tests.training import FEW, LORAS, SCRIPTS, config_of, problems_and_remarks, several_blocks, train

BF16 = {"mixed_precision": "bf16"}
WAYS = [
    *((script, {}) for script in SCRIPTS),
    *((script, {"fp8_base": True, **BF16}) for script in LORAS),
    ("sdxl_train_network", {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}),
    *((script, {"network_module": "lycoris.kohya", "network_args": ["algo=full"]}) for script in LORAS),
    pytest.param("flux_train_network", {"compile": True, "compile_backend": "eager"}, id="compiled"),
    ("flux_train_network", {"gradient_checkpointing": True, "network_dropout": 0.1}),
]
SWAPPED = [("flux_train_network", 2), ("flux_train_network", 2), ("flux_train", 2), ("qwen_image_train_network", 1)]


def block_layers(family):
    """Some layers in blocks of the denoiser, by the names that files have for them."""
    denoiser = family.load(torch.float32).denoiser
    found = targets.find_target_layers(denoiser, "denoiser", family.adapter_name, tuple(family.block_classes))
    layers = {one.name: one.layer for one in found if one.inside and isinstance(one.layer, torch.nn.Linear)}
    return dict([*layers.items()][::5])


def values_of(demo, script, tmp_path, **more):
    """A training that generates an image before, between and after its two steps, and a LoRA that changes these."""
    config = config_of(demo, script)
    family = families.family_for(config)
    file = tmp_path / "fast.safetensors"
    if not file.exists():
        lora_file(file, block_layers(family))
    (tmp_path / "prompts.txt").write_text("a cat --w 64 --h 64 --d 3\n", encoding="utf-8")
    sampling = {"sample_at_first": True, "sample_every_n_steps": 1, "sample_steps": 2, "sample_scale": 1.0}
    return {
        "sample_prompts": tmp_path / "prompts.txt",
        "max_train_steps": 2,
        "seed": 3,
        **sampling,
        **more,
    }, f"{file}:0.8"


def digest(network):
    hasher = hashlib.sha256()
    for _, tensor in sorted(network.state_dict().items()):
        hasher.update(tensor.detach().cpu().flatten().clone().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest(), sum(len(module._forward_hooks) for module in network.modules())


@pytest.fixture
def watched(monkeypatch):
    """What the denoiser holds before and after each set of images: its weights and hooks."""
    seen, generate = [], samples.SampleRunner._generate

    def watching(self, *arguments):
        seen.append(digest(self._components.denoiser))
        generate(self, *arguments)
        seen.append(digest(self._components.denoiser))

    monkeypatch.setattr(samples.SampleRunner, "_generate", watching)
    return seen


def compare(demo, squares, tmp_path, watched, script, how):
    values, lora = values_of(demo, script, tmp_path, train_data_dir=squares, **how)
    plain = train(config_of(demo, script, output_dir=tmp_path / "plain", **values))
    watched.clear()
    fast = train(config_of(demo, script, output_dir=tmp_path / "fast", sample_lora=lora, **values))
    assert len(watched) == 6 and watched[::2] == watched[1::2]
    assert fast.losses == plain.losses and not fast.events("sample_failed")
    ours, theirs = fast.tensors(), plain.tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    images = [[Image.open(event["file"]) for event in run.events("sample")] for run in (plain, fast)]
    assert [len(row) for row in images] == [3, 3]
    assert not any(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in zip(*images, strict=True))


@pytest.mark.parametrize(("script", "how"), WAYS)
def test_weights_and_losses_are_those_of_a_training_without_it(demo, squares, tmp_path, watched, script, how):
    compare(demo, squares, tmp_path, watched, script, how)


@pytest.mark.parametrize("script", LORAS)
def test_several_files_act_together_and_are_all_gone_afterwards(demo, squares, tmp_path, watched, script):
    values, first = values_of(demo, script, tmp_path, train_data_dir=squares)
    second = tmp_path / "second style.safetensors"
    lora_file(second, block_layers(families.family_for(config_of(demo, script))), seed=1)

    def trained(name, *files):
        return train(config_of(demo, script, output_dir=tmp_path / name, sample_lora=[*files], **values))

    runs = [trained("plain"), trained("one", first), trained("other", f"{second}:0.5")]
    watched.clear()
    both = trained("both", first, f"{second}:0.5")
    assert len(watched) == 6 and watched[::2] == watched[1::2]
    assert all(run.losses == both.losses for run in runs)
    images = [Image.open(run.events("sample")[0]["file"]) for run in (*runs, both)]
    assert len({image.tobytes() for image in images}) == 4
    assert [lora["file"] for lora in json.loads(images[3].text["kohya"])["loras"]] == [
        "fast.safetensors",
        second.name,
    ]
    assert all(torch.equal(both.tensors()[name], tensor) for name, tensor in runs[0].tensors().items())


@several_blocks
@pytest.mark.parametrize(("script", "number"), SWAPPED)
def test_swapped_blocks_are_left_alone(demo, squares, tmp_path, watched, script, number):
    compare(demo, squares, tmp_path, watched, script, {"blocks_to_swap": number})


def test_prompts_with_more_steps_of_their_own_are_named(demo, squares, tmp_path):
    values, lora = values_of(demo, "flux_train_network", tmp_path, train_data_dir=squares, output_dir=tmp_path / "out")
    (tmp_path / "prompts.txt").write_text("a cat --s 20\na dog --s 2\na cow\n", encoding="utf-8")
    remarks = problems_and_remarks(config_of(demo, "flux_train_network", sample_lora=lora, **values))[1]
    assert [str(one) for one in remarks if one.option == "sample_lora"] == [
        "sample_lora: prompts.txt has 1 prompt with more steps (--s) than the 2 of the LoRA, and theirs count; "
        "leave --s out"
    ]


@pytest.mark.parametrize("option", ["sample_lora", "assistant_lora"])
def test_a_strength_that_is_no_number_is_one_problem(demo, squares, tmp_path, option):
    values, _ = values_of(demo, "flux_train_network", tmp_path, train_data_dir=squares, output_dir=tmp_path / "out")
    config = config_of(demo, "flux_train_network", **values)
    value = options_of(type(config))[option].read("gone.safetensors:nan")
    config = draft(type(config), {**option_values(config), option: value})
    (said,) = [*few_steps.setting_problems(config), *find_method_problems(config), *_rules(config)]
    assert str(said) == f"{option} has the strength 'nan', which is not a number; write gone.safetensors:0.8"


def _rules(config):
    return [*config.sample.check(config), *config.network.check(config)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_file_that_is_missing_or_of_another_family_is_named_by_the_check(demo, squares, tmp_path, script):
    values, _ = values_of(demo, script, tmp_path, train_data_dir=squares, output_dir=tmp_path / "out")

    def found(file):
        problems = problems_and_remarks(config_of(demo, script, sample_lora=file, **values))[0]
        return [str(problem) for problem in problems if problem.option == "sample_lora"]

    assert found(tmp_path / "gone.safetensors:0.5") == [f"sample_lora: {tmp_path / 'gone.safetensors'} does not exist"]
    is_unet = "resnet" in FEW[script]
    other = next(name for name in LORAS if ("resnet" in FEW[name]) != is_unet)
    family = families.family_for(config_of(demo, other))
    foreign = lora_file(tmp_path / "other.safetensors", block_layers(family))
    (problem,) = found(foreign)
    assert "was made for" in problem or "choose a file made for it" in problem
