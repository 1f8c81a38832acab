"""What the tests of several families ask of theirs in the same way."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from library import families
from library.config.building import build_config
from library.tools import extract, resize
from tests.training import config_of, pictures, train

TO_DISK = {"cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True}


def configured(script, options):
    """The family of a config; paths among its options may be Paths."""
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return families.family_for(build_config(families.config_class(script), texts))


def family_of(files, name, script, values, **usual):
    """The family of a config on files by part, of which `name` is the transformer; `values` replace the usual ones."""
    options = {"pretrained_model_name_or_path": files[name], "text_encoder": files["text_encoder"], "vae": files["vae"]}
    return configured(script, options | usual | values)


def assert_one_problem_each(cases, said):
    for paths, sentence in cases:
        problems = said(paths)
        assert len(problems) == 1 and sentence in problems[0] and "\n" not in problems[0], (paths, problems)


def text_lengths(folder, names, key, architecture):
    """The numbers of tokens in caches of captions, which have one tensor each."""
    lengths = []
    for name in names:
        with safe_open(folder / name, "pt") as file:
            assert [*file.keys()] == [key] and file.metadata()["architecture"] == architecture
            lengths.append(file.get_tensor(key).shape[0])
    return lengths


def output_and_gradients(model, inputs, answer):
    """What `answer` returns, and the gradients of its mean square by the name of a parameter or an input."""
    model.requires_grad_(True)
    output = answer()
    output.square().mean().backward()
    named = dict(model.named_parameters()) | inputs
    gradients = {name: tensor.grad for name, tensor in named.items()}
    for tensor in named.values():
        tensor.grad = None
    model.requires_grad_(False)
    return output.detach(), gradients


def assert_gradients_close(actual, expected, atol=1e-5):
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def qwen3_of(file, hidden_size, layers):
    """The tiny text encoder of a file in transformers."""
    from transformers import Qwen3Config, Qwen3Model

    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    config = Qwen3Config(
        vocab_size=tensors["embed_tokens.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    encoder = Qwen3Model(config).eval()
    encoder.load_state_dict(tensors, strict=True)
    return encoder


def short_trainings(demo, script, folder, **always):
    """The folder of two images, and a function that trains on them with caches on the disk."""
    data = pictures(folder / "data", ((64, 64), (64, 128)), repeats=1)
    usual = {**TO_DISK, "max_train_steps": 2, "resolution": "96", **always}

    def run(name, **values):
        return train(config_of(demo, script, train_data_dir=data, output_dir=folder / name, **usual | values))

    return data / "1_zorb toy", run


def leave_as_musubi_tuner(folder, names, changed=lambda name, tensors: tensors):
    """Write caches again without what this program adds to theirs."""
    for name in names:
        with safe_open(folder / name, "pt") as file:
            facts = {key: value for key, value in file.metadata().items() if not key.startswith("made_from")}
        tensors = load((folder / name).read_bytes())  # Windows writes over no file that is mapped
        save_file(changed(name, tensors), folder / name, facts)


def extract_and_resize(merged, base, lora, folder):
    """Take a LoRA out of the model that it was merged into, and make it smaller."""
    choices = extract.ExtractOptions(rank=8, min_diff=0)
    back = extract.extract_lora(merged, base, folder / "back.safetensors", choices=choices)
    assert load_file(back.path).keys() == load_file(lora).keys()
    small = resize.resize_lora(lora, folder / "small.safetensors", choices=resize.ResizeOptions(rank=2))
    assert {t.shape[0] for name, t in load_file(small.path).items() if name.endswith("down.weight")} <= {1, 2}
