"""A word learns a meaning: only its vectors change, and its file is what other programs take for one."""

from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families, methods
from library.check import preflight
from library.cli.launch import script_of_toml
from library.config.building import build_config
from library.config.dataset import SubsetConfig
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.config.sections import embedding
from library.data import captions
from library.families.shared import added_words
from tests.training import FEW, config_of, pictures, train

SCRIPT = "sdxl_train_textual_inversion"
PROMPT = "a photo of zorb at night"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("words"), ((64, 64),) * 2)


@pytest.fixture(scope="module")
def config(demo, data):
    """A function: options -> a config of the tiny model whose word is zorb."""
    options = {"train_data_dir": data, "save_model_as": "safetensors", "output_name": "w", "max_train_steps": 3}
    return lambda output, **values: config_of(demo, SCRIPT, **options | {"output_dir": output, "seed": 5} | values)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """Three steps with a state after the second, and a sample image after the third."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "prompts.txt").write_text(f"{PROMPT} --w 64 --h 64 --s 1 --d 1\n", encoding="utf-8")
    keeps = {"save_state": True, "save_every_n_steps": 2, "sample_prompts": folder / "prompts.txt"}
    return train(config(folder, **keeps, sample_every_n_steps=3))


def attached(config):
    """The family, its networks and what learns, as a training has them."""
    family = families.family_for(config)
    parts = family.load(torch.float32)
    torch.manual_seed(0)
    return family, parts, methods.attach_method(parts, family, config)


def test_only_the_new_vectors_learn_and_the_rest_stays(config, tmp_path):
    family, parts, method = attached(config(tmp_path))
    learning = {
        name for encoder in parts.encoders.values() for name, p in encoder.named_parameters() if p.requires_grad
    }
    assert learning and all(name.endswith("token_embedding.vectors") for name in learning)
    assert not any(p.requires_grad for p in parts.denoiser.parameters())
    family.text(parts, ["zorb zorb1 on a table"])["pool2"].sum().backward()
    assert method.layers["clip_g"].vectors.grad.abs().sum(1).gt(0).all()
    assert all(layer.known.weight.grad is None for layer in method.layers.values())
    begins = added_words.word_tokens(parts.tokenizers["clip_l"], "cat")  # init_word: its tokens in turn
    vectors = method.layers["clip_l"].known.weight
    assert torch.equal(method.layers["clip_l"].vectors, vectors[[begins[i % len(begins)] for i in range(2)]])


def test_other_captions_are_read_as_before(config, tmp_path):
    run_config = config(tmp_path)
    family = families.family_for(run_config)
    plain = family.text(family.load(torch.float32), ["a red cat"])
    family, parts, _ = attached(run_config)
    with torch.no_grad():
        assert all(torch.equal(value, plain[name]) for name, value in family.text(parts, ["a red cat"]).items())


def test_the_file_is_upstreams_and_loads_in_diffusers_with_both_encoders(trained, config, tmp_path):
    from diffusers.loaders import TextualInversionLoaderMixin

    tensors = trained.tensors()
    assert {name: len(vectors) for name, vectors in tensors.items()} == {"clip_l": 2, "clip_g": 2}
    family, parts, method = attached(config(tmp_path, weights=trained.file))
    assert all(torch.equal(layer.vectors, tensors[name]) for name, layer in method.layers.items())
    with torch.no_grad():
        ours = family.text(parts, [PROMPT.replace("zorb", "zorb zorb1")])
    plain = family.load(torch.float32)
    for name, output in (("clip_l", "hidden_state1"), ("clip_g", "hidden_state2")):
        pipe = TextualInversionLoaderMixin()
        pipe.tokenizer, pipe.text_encoder = plain.tokenizers[name], plain.encoders[name]
        pipe.components, pipe.hf_device_map = {}, None
        pipe.load_textual_inversion(tensors[name], token="zorb")
        prompt = pipe.maybe_convert_prompt(PROMPT, pipe.tokenizer)
        ids = pipe.tokenizer(prompt, add_special_tokens=False).input_ids
        row = [pipe.tokenizer.bos_token_id, *ids, pipe.tokenizer.eos_token_id]
        with torch.no_grad():
            said = pipe.text_encoder(torch.tensor([row]), output_hidden_states=True).hidden_states[-2]
        assert torch.allclose(said, ours[output][:, : len(row)], atol=1e-5)


def test_a_run_says_what_it_made_and_samples_with_the_word(trained):
    from safetensors import safe_open

    assert trained.facts["state"] == "finished" and len(trained.losses) == 3
    assert len([*(trained.file.parent / "sample").glob("*.png")]) == 1
    with safe_open(trained.file, "pt") as file:
        about = file.metadata()
    assert about["modelspec.architecture"] == "stable-diffusion-xl-v1-base/textual-inversion"
    assert about["modelspec.trigger_phrase"] == "zorb"
    assert not [name for name in about if not name.startswith("modelspec.")]


def test_what_is_resumed_ends_bit_for_bit_the_same_as_pt_too(trained, config, tmp_path):
    state = trained.file.with_name("w-step00000002-state")
    again = train(config(tmp_path, resume=state, save_model_as="pt"))
    assert not [e for e in again.events("warning") if "resume" in e["text"]]
    assert again.losses == trained.losses[2:]
    tensors = torch.load(again.file, weights_only=True)
    assert {name: vectors.dtype for name, vectors in tensors.items()} == dict.fromkeys(
        ("clip_l", "clip_g"), torch.float32
    )
    assert all(torch.equal(vectors, trained.tensors()[name]) for name, vectors in tensors.items())


def test_captions_get_all_vectors_or_become_sentences():
    words = embedding.Embedding(token_string="zorb", num_vectors_per_token=3)
    plain = SubsetConfig()
    assert captions.process("zorb, red", plain, Random(0), change=words.caption_change) == "zorb zorb1 zorb2, red"
    one = embedding.Embedding(token_string="zorb", use_object_template=True)
    results = {captions.process("a caption", plain, Random(i), change=one.caption_change) for i in range(500)}
    assert len(results) == 27 and {"a photo of my zorb", "a rendering of a zorb", "a dark photo of the zorb"} <= results
    style = embedding.Embedding(token_string="zorb", num_vectors_per_token=2, use_style_template=True).caption_change
    assert len(style.sentences) == 19 and "a nice painting in the style of zorb zorb1" in style.sentences
    dropped = SubsetConfig(caption_dropout_rate=1.0)
    assert captions.process("zorb", dropped, Random(0), change=style) == ""
    assert words.caption_change.of_prompt("a zorb") == "a zorb zorb1 zorb2"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"token_string": "a"}, "token_string: the model knows a already; choose a word that it does not know"),
        ({"token_string": "sks-cat"}, "'sks-cat' is in none of the captions, so nothing would be trained"),
        ({"weights": "gone.safetensors"}, "weights: gone.safetensors does not exist"),
        ({"num_vectors_per_token": 3}, "w.safetensors has 2 vectors, and num_vectors_per_token is 3: set it to 2"),
        ({"learning_rate": 0}, "learning_rate is 0, so nothing would be trained"),
    ],
)
def test_what_cannot_be_trained_is_reported_before_a_model_is_loaded(trained, config, tmp_path, values, said):
    with pytest.raises(ConfigError) as error:
        preflight.check_before_training(config(tmp_path, **{"weights": trained.file} | values))
    assert [problem for problem in error.value.problems if said in str(problem)], error.value


def test_a_file_of_another_model_is_refused(config, tmp_path, trained):
    odd = {name: vectors[:, 1:] for name, vectors in load_file(trained.file).items()}
    save_file({name: vectors.contiguous() for name, vectors in odd.items()}, tmp_path / "odd.safetensors")
    with pytest.raises(ConfigError, match=r"the vectors of .* have \d+ numbers for clip_l, and this model's have"):
        attached(config(tmp_path, weights=tmp_path / "odd.safetensors"))
    save_file({"emb_params": torch.zeros(2, 8)}, tmp_path / "sd1.safetensors")
    with pytest.raises(ConfigError, match="has no vectors for the text encoder clip_l"):
        attached(config(tmp_path, weights=tmp_path / "sd1.safetensors"))


def test_rules_of_the_options_and_the_script_that_a_file_is_for(tmp_path):
    kind = families.config_class(SCRIPT)
    for options, said in (
        ({"token_string": "my cat"}, "token_string must be one word without spaces: write my-cat"),
        ({"use_object_template": True, "use_style_template": True}, "use_object_template"),
        ({"cache_text_encoder_outputs": True}, "the trained word is encoded in each step"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_config(kind, options)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(build_config(kind, {"token_string": "zorb", "resolution": "64"})), encoding="utf-8")
    assert script_of_toml(path) == SCRIPT


def test_compiled_it_needs_the_predicted_graphs_and_gives_the_same_losses(config, tmp_path):
    eager = train(config(tmp_path / "eager"))
    compiled = train(
        config(tmp_path / "compiled", compile=True, compile_backend="eager", compile_blocks=FEW["sdxl_train"])
    )
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["graphs"] and not told["recompiles"], told
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
