"""Small networks learn to follow a control image: nothing else learns, and their file is upstream's."""

import hashlib
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from library import data, families, methods
from library.check import preflight
from library.cli.launch import script_of_toml
from library.compiler.torch_private import mark_dynamic
from library.config.building import build_config
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.data.loading import Batches
from library.data.pixels import read_pixels, to_tensor
from library.families.base import ModelComponents
from library.methods import lllite
from tests.training import config_of, pictures, problems_and_remarks, train

SCRIPT = "sdxl_train_control_net_lllite"
# SHA-256 of the names and shapes that upstream writes for the published SDXL, network_dim 64 and cond_emb_dim 32.
UPSTREAM = "af395642a3bd12d074e0d19ec24754a0d6e52aa0829ff42725877b90e0728b42"
# Sum and last row of what upstream's layer answers to the numbers of `filled`, by depth.
ANSWERS = {
    1: (84.905563, [-0.860762, 0.050788, 1.115839, -0.468110, 0.073540]),
    2: (21.653759, [0.088708, 0.589178, -0.361533, 0.442095, 0.658436]),
    3: (-0.800786, [-0.320760, 0.954660, -0.116049, -0.822214, 0.451531]),
}
SIZE = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three images of two sizes, and their control images, mirrored so that they are others."""
    images = pictures(tmp_path_factory.mktemp("images"), ((64, 64), (64, 64), (128, 64)), 1)
    control = tmp_path_factory.mktemp("control")
    for path in images.glob("*/*.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(control / path.name)
    return images, control


@pytest.fixture(scope="module")
def config(demo, folders):
    known = {"train_data_dir": folders[0], "conditioning_data_dir": folders[1], "output_name": "c"}
    known |= {"min_bucket_reso": 64, "learning_rate": 1e-2, "max_train_steps": 3}
    return lambda output, **values: config_of(demo, SCRIPT, **known | {"output_dir": output, "seed": 5} | values)


@pytest.fixture(scope="module")
def trained(config, folders, tmp_path_factory):
    """Three steps with a state after the second, and two sample images at the end."""
    folder = tmp_path_factory.mktemp("trained")
    prompt = "zorb --w 64 --h 64 --s 1 --d 1"
    lines = [f"{prompt} --cn {folders[1] / '0.png'}", prompt]
    (folder / "prompts.txt").write_text("\n".join(lines), encoding="utf-8")
    keeps = {"save_state": True, "save_every_n_steps": 2, "sample_prompts": folder / "prompts.txt"}
    return train(config(folder, **keeps, sample_every_n_steps=3))


def attached(config):
    family = families.family_for(config)
    parts = family.load(torch.float32)
    torch.manual_seed(0)
    return family, parts, methods.attach_method(parts, family, config)


def answer(family, parts, controls=()):
    chance = torch.Generator().manual_seed(3)
    noised = family.noised(torch.randn(1, 4, 8, 8, generator=chance), chance)
    return family.predict(parts.denoiser, noised, family.text(parts, ["zorb"]), SIZE, controls)


def test_at_first_nothing_is_changed_and_only_the_networks_learn(config, tmp_path):
    family, parts, method = attached(config(tmp_path))
    picture = torch.rand(1, 3, 64, 64) * 2 - 1
    plain, shown = answer(family, parts), answer(family, parts, [picture])
    assert torch.equal(plain, shown)  # the last layers are zero
    shown.square().mean().backward()
    learning = {id(p) for p in method.parameters()}
    assert {id(p) for p in parts.denoiser.parameters() if p.requires_grad} == learning
    assert all(layer.up[0].weight.grad.abs().sum() > 0 for layer in method.layers.values())
    with torch.no_grad():
        for layer in method.layers.values():
            layer.up[0].weight.normal_()
    assert not torch.equal(answer(family, parts, [picture]), plain)
    assert not torch.equal(answer(family, parts, [picture]), answer(family, parts, [-picture]))
    assert torch.equal(answer(family, parts), plain)  # without a control image it is the plain model


def filled(*shape, factor, start=0.0):
    numbers = torch.arange(torch.Size(shape).numel())
    return (numbers * factor + start).sin().reshape(shape)


@pytest.mark.parametrize("depth", ANSWERS)
def test_a_layer_answers_as_upstreams(depth):
    layer = lllite.ControlledLinear(torch.nn.Linear(6, 5), depth - 1, (4, 3), 0.0)
    with torch.no_grad():
        for number, (_, p) in enumerate(sorted(layer.named_parameters())):
            p.copy_(filled(*p.shape, factor=0.7, start=number) * 0.3)
    places = (64 // 8 // 2 ** (depth - 1)) ** 2
    layer.picture.pixels = filled(2, 3, 64, 64, factor=0.01)
    actual = layer((torch.arange(2 * places * 6) * 0.3).cos().reshape(2, places, 6))
    total, last = ANSWERS[depth]
    assert actual.sum().item() == pytest.approx(total, abs=1e-3)
    assert actual[1, -1].tolist() == pytest.approx(last, abs=1e-5)


def test_names_and_shapes_of_the_published_model_are_upstreams():
    config = build_config(families.config_class(SCRIPT), {"network_dim": 64, "cond_emb_dim": 32, "learning_rate": 1e-3})
    module, family = families.random_module("sdxl"), families.family_for(config)
    denoiser = module.make_networks(module.FULL).denoiser()
    families.adopt_denoiser(family, denoiser)
    method = methods.attach_method(ModelComponents(denoiser, None, {}, {}), family, config)
    shapes = sorted((name, tuple(p.shape)) for name, p in method.named().items())
    assert len(shapes) == 1600 and hashlib.sha256(repr(shapes).encode()).hexdigest() == UPSTREAM


def test_a_run_learns_samples_and_says_what_it_made(trained):
    from safetensors import safe_open

    assert trained.facts["state"] == "finished" and len(trained.losses) == 3
    with safe_open(trained.file, "pt") as file:
        about = file.metadata()
    assert about["modelspec.architecture"] == "stable-diffusion-xl-v1-base/control-net-lllite"
    first, other = (Image.open(path) for path in sorted((trained.file.parent / "sample").glob("*.png")))
    assert first.tobytes() != other.tobytes()  # with the control image and without it


def test_what_is_resumed_ends_bit_for_bit_the_same(trained, config, tmp_path):
    again = train(config(tmp_path, resume=trained.file.with_name("c-step00000002-state")))
    assert not [e for e in again.events("warning") if "resume" in str(e["text"])]
    assert again.losses == trained.losses[2:]
    tensors = again.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in trained.tensors().items())


def test_going_on_from_a_file_and_what_does_not_fit(trained, config, tmp_path):
    _, _, method = attached(config(tmp_path, network_weights=trained.file))
    tensors = method.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in trained.tensors().items())
    with pytest.raises(ConfigError, match="network_weights: .* does not fit"):
        preflight.check_before_training(config(tmp_path, network_weights=trained.file, network_dim=4))
    save_file({"lora_unet_x.lora_up.weight": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match="network_weights: .*lora.safetensors"):
        preflight.check_before_training(config(tmp_path, network_weights=tmp_path / "lora.safetensors"))


@pytest.mark.parametrize("cached", [True, False])
def test_a_batch_has_the_control_images_cut_and_mirrored_like_its_images(config, tmp_path, cached):
    made = config(tmp_path, cache_latents=cached, flip_aug=True, train_batch_size=2)
    batches = Batches(data.scan(made), made, 0)
    draw = next(draw for draw in batches.draws(1) if len(draw.images) == 2)
    draw = replace(draw, images=tuple(n for n, image in enumerate(batches.images.items) if image.size == (64, 64)))
    parts = list(batches.choices(draw))
    if cached:  # latents are not made here
        batches.images.latents = type(
            "Cache",
            (),
            {"load": lambda *_: {name: torch.zeros(4, 8, 8).numpy() for name in ("latents", "latents_flipped")}},
        )()
    (control,) = batches.make(draw).controls
    assert control.shape == (2, 3, 64, 64)
    for part, pixels in zip(parts, control, strict=True):
        expected = to_tensor(read_pixels(part.image.mask_file))
        assert torch.equal(pixels, expected.flip(-1) if part.flip else expected)


def test_control_images_are_found_as_upstream_finds_them(config, folders, tmp_path):
    images, control = (shutil.copytree(folder, tmp_path / folder.name) for folder in folders)
    flat = next(images.iterdir()).rename(images / "flat")
    toml = tmp_path / "d.toml"
    text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{flat}'\n"
    text += f"conditioning_data_dir = '{control}'\n"
    toml.write_text(text, encoding="utf-8")
    by_file = config(tmp_path / "o", dataset_config=toml, train_data_dir=None, conditioning_data_dir=None)
    for source_config in (by_file, config(tmp_path / "o", train_data_dir=flat, conditioning_data_dir=control)):
        image_set = data.scan(source_config).items
        assert sorted(image.mask_file for image in image_set) == [str(control / f"{number}.png") for number in range(3)]
    (control / "1.png").unlink()
    Image.new("RGB", (32, 32)).save(control / "0.png")
    with pytest.raises(ConfigError) as error:
        preflight.check_before_training(by_file)
    said = str(error.value)
    assert f"conditioning_data_dir: {control} has no control image of 1 image: {flat / '1.png'}; add files" in said
    assert "0.png is 32x32, but its image is 64x64" in said
    for name in ("0.png", "2.png"):
        (control / name).unlink()
    (problem,) = [remark for remark in problems_and_remarks(by_file)[0] if remark.option == "conditioning_data_dir"]
    assert "no control image of 3 images: " in str(problem)
    control.rmdir()
    (problem,) = [remark for remark in problems_and_remarks(by_file)[0] if remark.option == "conditioning_data_dir"]
    assert "does not exist" in str(problem)
    toml.write_text(text.replace("conditioning_data_dir", "# "), encoding="utf-8")
    with pytest.raises(ConfigError, match="conditioning_data_dir.* is not set: name the folder of control images"):
        preflight.check_before_training(by_file)


def test_rules_of_the_options_and_the_script_that_a_file_is_for(tmp_path):
    kind = families.config_class(SCRIPT)
    with pytest.raises(ConfigError, match="masked_loss cannot be used here"):
        build_config(kind, {"masked_loss": True})
    path = tmp_path / "run.toml"
    path.write_text(to_toml(build_config(kind, {"cond_emb_dim": 32, "network_dim": 64})), encoding="utf-8")
    assert script_of_toml(path) == SCRIPT


def test_images_may_keep_the_base_models_answer(config, folders, tmp_path):
    """Trained on these alone, a network that changes nothing yet learns nothing; and one that does is drawn back."""
    toml = tmp_path / "d.toml"
    (folder,) = folders[0].iterdir()
    text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder}'\n"
    text += f"conditioning_data_dir = '{folders[1]}'\ncustom_attributes.diff_output_preservation = true\n"
    toml.write_text(text, encoding="utf-8")
    options = {"dataset_config": toml, "train_data_dir": None, "conditioning_data_dir": None, "max_train_steps": 2}
    plain = train(config(tmp_path / "plain", **options))
    assert plain.losses == [0.0, 0.0]
    changed = tmp_path / "changed.safetensors"
    save_file({name: torch.ones_like(tensor) * 0.05 for name, tensor in plain.tensors().items()}, changed)
    assert train(config(tmp_path / "back", **options, network_weights=changed)).losses[0] > 0


def test_compiled_it_needs_the_predicted_graphs_and_gives_the_same_losses(config, tmp_path):
    options = {"gradient_checkpointing": True, "max_train_steps": 4, "resolution": "192"}
    eager = train(config(tmp_path / "eager", **options))
    # The small networks are in transformer blocks; the others are compiled in test_compiled.py.
    compile_options = {"compile": True, "compile_backend": "eager", "compile_blocks": "transformer:0"}
    compiled = train(config(tmp_path / "compiled", **options, **compile_options))
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["graphs"] and not told["recompiles"], told
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)


def test_a_layer_has_one_graph_for_all_sizes_of_control_images():
    layer = lllite.ControlledLinear(torch.nn.Linear(8, 8), 2, (32, 16), 0.0)
    graphs = []
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for height, width in ((1024, 1024), (1216, 832), (512, 512)):
        pixels = torch.randn(1, 3, height, width)
        x = torch.randn(1, height // 32 * (width // 32), 8)
        for tensor, sides in ((pixels, (2, 3)), (x, (1,))):
            for side in sides:
                mark_dynamic(tensor, side)
        layer.picture.pixels = pixels
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) == 1
