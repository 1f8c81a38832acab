import copy
import importlib
import json
import random
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from library import methods
from library.adapter_files.changes import LayerChange
from library.adapter_files.names import TENSOR_ROLES
from library.bench import subjects
from library.config.problems import ConfigError
from library.families import network_args
from library.families.adapter_kinds import LYCORIS_KINDS
from library.methods import lycoris as lycoris_bridge
from tests.training import LORAS

pytest.importorskip("lycoris")


def inputs():
    torch.manual_seed(3)
    return torch.randn(2, 5, 4), torch.randn(2, 3, 6)


def lycoris(flux_like, flux_config, *args, **options):
    family, parts = flux_like
    config = flux_config(network_module="lycoris.kohya", network_dim=4, network_args=list(args), **options)
    return parts, methods.attach_method(parts, family, config)


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "diag-oft", "dylora", "glora", "ia3", "full"])
def test_every_algorithm_attaches_learns_and_comes_back(flux_like, flux_config, algo):
    before = flux_like[1].denoiser(*inputs())
    args = [f"algo={algo}", *(["factor=4"] if algo == "lokr" else [])]
    parts, method = lycoris(flux_like, flux_config, *args)
    assert method.trained_parts["denoiser"]
    torch.testing.assert_close(parts.denoiser(*inputs()), before, rtol=1e-4, atol=1e-5)
    parts.denoiser(*inputs()).square().mean().backward()
    learning = {id(p) for p in method.parameters()}
    actual = {id(p) for p in parts.denoiser.parameters() if p.grad is not None}
    assert actual and actual <= learning
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    method.train(False)  # in which DyLoRA takes all of its ranks
    learned, state = parts.denoiser(*inputs()), {k: v.clone() for k, v in method.state_dict().items()}
    assert not torch.equal(learned, before)
    if algo == "full":
        return  # the package reads it into a fresh network only
    with torch.no_grad():
        for p in method.parameters():
            p.zero_()
    assert not method.load_state_dict(state).unexpected
    torch.testing.assert_close(parts.denoiser(*inputs()), learned)


VARIANTS = {
    "locon": [[], ["dora_wd=True"], ["dora_wd=True", "wd_on_output=False"], ["use_scalar=True"], ["train_norm=True"]],
    "loha": [[], ["dora_wd=True"], ["rank_dropout=0.5"]],
    "lokr": [["factor=2"], ["factor=2", "dora_wd=True"], ["factor=2", "full_matrix=True", "dora_wd=True"]],
    "diag-oft": [[], ["rescaled=True"], ["constraint=0.1"]],
    "boft": [["preset=TOML"], ["preset=TOML", "rescaled=True"]],
    "dylora": [[], ["block_size=2"]],
    "ia3": [[], ["train_on_input=True"]],
    "full": [[], ["rank_dropout=0.5"]],
}
BYPASSED = ("locon", "loha", "lokr", "diag-oft", "glora", "ia3")
KINDS = [[f"algo={algo}", *more] for algo in LYCORIS_KINDS if algo != "dora" for more in VARIANTS.get(algo, [[]])]
KINDS += [[f"algo={algo}", *VARIANTS.get(algo, [[]])[0], "bypass_mode=True"] for algo in BYPASSED]


def boft_layers(args, folder):
    """The arguments with a preset of layers that BOFT can divide."""
    (folder / "boft.toml").write_text(
        "unet_target_name = ['double_blocks.*.img_attn.proj']\nuse_fnmatch = true\n"
        "unet_target_module = []\ntext_encoder_target_module = []"
    )
    return [arg.replace("TOML", str(folder / "boft.toml")) for arg in args]


@pytest.mark.parametrize("args", KINDS, ids=" ".join)
def test_a_model_whose_adapters_are_switched_off_is_the_base_model(flux_like, flux_config, tmp_path, args):
    """In training, with dropout, and whatever they have learned."""
    args = boft_layers(args, tmp_path)
    before = flux_like[1].denoiser(*inputs())
    parts, method = lycoris(flux_like, flux_config, *args)
    method.train()
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    assert not torch.allclose(parts.denoiser(*inputs()), before)
    method.set_multiplier(0.0)
    torch.testing.assert_close(parts.denoiser(*inputs()), before, rtol=1e-6, atol=1e-6)
    method.set_multiplier(1.0)
    assert not torch.allclose(parts.denoiser(*inputs()), before)


@pytest.mark.parametrize("args", KINDS, ids=" ".join)
def test_samples_and_validation_compute_the_same_each_time_and_draw_nothing(flux_like, flux_config, tmp_path, args):
    args = boft_layers(args, tmp_path)
    dropout = 0.0 if "bypass_mode=True" in args else 0.1
    parts, method = lycoris(flux_like, flux_config, *args, network_dropout=dropout)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    method.train(False)
    given = inputs()
    before = random.getstate(), torch.get_rng_state()
    first, *others = (parts.denoiser(*given) for _ in range(5))
    assert all(torch.equal(first, other) for other in others)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_a_compiled_block_switches_its_adapters_off_and_on(flux_like, flux_config):
    before = flux_like[1].denoiser(*inputs())
    parts, method = lycoris(flux_like, flux_config, "algo=locon", "dora_wd=True")
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    learned = parts.denoiser(*inputs())
    for block in (*parts.denoiser.double_blocks, *parts.denoiser.single_blocks):
        block.compile(backend="eager")
    for multiplier, expected in ((1.0, learned), (0.0, before), (1.0, learned), (0.0, before)):
        method.set_multiplier(multiplier)
        torch.testing.assert_close(parts.denoiser(*inputs()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("script", LORAS)
def test_layers_whose_weights_the_package_takes_away_still_compute(script):
    """algo=full does so with each layer and norm that it trains."""
    values = {"network_module": "lycoris.kohya", "network_args": ["algo=full", "train_norm=True"]}
    subject, here = subjects.FamilySubject(script, values, "tiny"), torch.device("cpu")
    with torch.no_grad():
        trainable = subject.make(subject.config({}), here)
        answer = subject.predict(trainable, subject.resolutions[0], here)(trainable.components.denoiser)
    assert any(
        "weight" not in m._parameters for m in trainable.components.denoiser.modules() if isinstance(m, nn.Linear)
    )
    assert answer.isfinite().all()


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv2d(4, 4, 3)], ids=["linear", "convolution"])
@pytest.mark.parametrize("algo", BYPASSED)
def test_beside_a_base_in_bf16_layers_still_answer_in_bf16(flux_like, flux_config, algo, layer):
    """Norms of U-Nets take nothing else. The adapters are in float32, as those that learn are."""
    base = copy.deepcopy(layer).bfloat16()
    network = importlib.import_module("lycoris").create_lycoris(base, 1.0, 2, 2, algo=algo, bypass_mode=True, factor=2)
    network.apply_to()
    for adapter in network.loras:
        lycoris_bridge._put_into_its_layer(adapter, torch.device("cpu"), torch.float32)
    x = torch.randn(2, 4, 5, 4) if isinstance(base, nn.Linear) else torch.randn(2, 4, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert network.loras and base(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr"])
def test_network_dropout_reaches_the_package(flux_like, flux_config, algo):
    _, method = lycoris(flux_like, flux_config, f"algo={algo}", network_dropout=0.25)
    assert {getattr(adapter.dropout, "p", adapter.dropout) for adapter in method.network.loras} == {0.25}


def test_rank_dropout_of_lokr_is_drawn_where_the_weights_are(flux_like, flux_config):
    """On a GPU, too, which no test machine needs to have: of a fake tensor the device is known."""
    _, method = lycoris(flux_like, flux_config, "algo=lokr", "factor=2", "rank_dropout=0.5", "rank_dropout_scale=True")
    adapter = method.train().network.loras[0]
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.fill_(1.0)
    torch.manual_seed(0)
    rows = {tuple(adapter.get_weight(None).flatten(1).ne(0).all(1).tolist()) for _ in range(5)}
    assert len(rows) > 1 and adapter.eval().get_weight(None).all()
    with FakeTensorMode(allow_non_fake_inputs=True):
        adapter.train()
        for name, parameter in adapter.named_parameters():
            adapter._parameters[name] = torch.empty_like(parameter, device="cuda")
        assert adapter.get_weight(None).device.type == "cuda"


def test_names_are_those_of_kohya_files(flux_like, flux_config):
    parts, method = lycoris(flux_like, flux_config, "algo=lokr", "factor=2")
    names = {key.split(".")[0] for key in method.state_dict()}
    assert "lora_unet_double_blocks_0_img_attn_qkv" in names and "lora_te1_text_model_0_q_proj" in names
    assert not any(name.startswith("lora_te3") for name in names)
    assert {k.split(".")[1] for k in method.state_dict()} <= {"lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "alpha"}


def test_adapters_move_with_their_layers(flux_like, flux_config):
    parts, method = lycoris(flux_like, flux_config, "algo=loha", network_train_unet_only=True)
    inside = {id(p) for p in parts.denoiser.parameters()}
    assert all(id(p) in inside for p in method.parameters())
    assert method.trained_parts == {"denoiser": True}


def test_rates_and_loraplus(flux_like, flux_config):
    _, method = lycoris(
        flux_like, flux_config, "algo=lora", "loraplus_unet_lr_ratio=4", unet_lr=1e-4, text_encoder_lr=[1e-5, 2e-5]
    )  # as in sd-scripts, the package gets the first rate
    assert [(g["name"], g["lr"]) for g in method.groups()] == [
        ("textencoder", 1e-5),
        ("unet", 1e-4),
        ("unet plus", 4e-4),
    ]


def test_wrong_arguments_are_found_before_anything_starts(flux_config):
    config = flux_config(network_module="lycoris.kohya", network_args=["alog=lokr", "conv_dim=x"])
    said = list(methods.find_method_problems(config))
    assert len(said) == 2 and "did you mean algo" in str(said[0])


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr"])
def test_dora_in_bypass_mode_is_refused_as_the_package_leaves_it_out(flux_config, algo):
    config = flux_config(
        network_module="lycoris.kohya", network_args=[f"algo={algo}", "dora_wd=True", "bypass_mode=True"]
    )
    assert any("leaves out what dora_wd learns" in str(problem) for problem in methods.find_method_problems(config))
    with pytest.raises(ConfigError, match="fp8_base cannot be used with dora_wd"):  # and so no advice to bypass
        flux_config(network_module="lycoris.kohya", fp8_base=True, network_args=[f"algo={algo}", "dora_wd=True"])


def test_an_algorithm_that_does_not_exist(flux_like, flux_config):
    with pytest.raises(ConfigError, match="algo must be one of lora, locon, .*got 'nonsense'"):
        lycoris(flux_like, flux_config, "algo=nonsense")


@pytest.mark.slow
def test_blocks_share_graphs(flux_like, flux_config):
    import torch._dynamo.testing

    torch._dynamo.reset()
    parts, _ = lycoris(flux_like, flux_config, "algo=lokr", "factor=2", network_train_unet_only=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    for block in [*parts.denoiser.double_blocks, *parts.denoiser.single_blocks]:
        block.compile(backend=counter)
    img, txt = (x.requires_grad_(True) for x in inputs())
    parts.denoiser(img, txt).sum().backward()
    assert counter.frame_count >= 2


def test_rank_and_strength_come_from_the_file(flux_like, flux_config, tmp_path):
    other, third = copy.deepcopy(flux_like), copy.deepcopy(flux_like)
    parts, method = lycoris(flux_like, flux_config, "algo=loha", network_alpha=2)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    facts = {"ss_network_dim": "4", "ss_network_alpha": "2.0", "ss_network_args": json.dumps({"algo": "loha"})}
    save_file(method.state_dict(), tmp_path / "a.safetensors", facts)
    save_file(method.state_dict(), tmp_path / "b.safetensors")
    learned, file = parts.denoiser(*inputs()), str(tmp_path / "a.safetensors")
    family, fresh = other
    config = flux_config(network_module="lycoris.kohya", network_dim=9, network_weights=file, dim_from_weights=True)
    methods.attach_method(fresh, family, config)
    torch.testing.assert_close(fresh.denoiser(*inputs()), learned)
    family, fresh = third
    same = {"network_module": "lycoris.kohya", "network_dim": 4, "network_args": ["algo=loha"]}
    methods.attach_method(fresh, family, flux_config(**same, network_alpha=1, network_weights=file))
    torch.testing.assert_close(fresh.denoiser(*inputs()), learned)
    silent = {"network_weights": str(tmp_path / "b.safetensors"), "dim_from_weights": True}
    with pytest.raises(ConfigError, match="does not say which network it was made by"):
        methods.attach_method(fresh, family, flux_config(**same, **silent))


@pytest.mark.parametrize(
    "args",
    [
        ["algo=lora", "dora_wd=True"],
        ["algo=loha"],
        ["algo=lokr", "factor=4"],
        ["algo=diag-oft"],
        ["algo=glora"],
        ["algo=ia3"],
        ["algo=full"],
        ["algo=dylora"],
    ],
    ids=" ".join,
)
def test_base_weights_of_every_kind_are_merged(flux_like, flux_config, tmp_path, args):
    (family, fresh), path = copy.deepcopy(flux_like), tmp_path / "a.safetensors"
    plain = fresh.denoiser(*inputs())
    parts, method = lycoris(flux_like, flux_config, *args, network_train_unet_only=True)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    method.train(False)
    learned = parts.denoiser(*inputs())
    save_file(method.state_dict(), path)
    methods.attach_method(fresh, family, flux_config(base_weights=[str(path)], network_train_unet_only=True))
    torch.testing.assert_close(fresh.denoiser(*inputs()), learned, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(learned, plain, rtol=1e-2)


def test_base_weights_of_no_adapter_are_a_sentence(flux_like, flux_config, tmp_path):
    family, parts = flux_like
    save_file({"clip_l": torch.ones(2, 768)}, path := tmp_path / "word.safetensors")
    with pytest.raises(ConfigError, match="base_weights: .* holds clip_l, which is neither LoRA nor a kind of LyCORIS"):
        methods.attach_method(parts, family, flux_config(base_weights=[str(path)]))


@pytest.mark.parametrize("stored", [torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "dylora", "glora", "full"])
def test_a_file_in_8_bits_is_read_with_all_its_numbers(flux_like, flux_config, tmp_path, algo, stored):
    fresh = copy.deepcopy(flux_like)
    _, method = lycoris(flux_like, flux_config, f"algo={algo}", network_alpha=2)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    tensors = {name: tensor.to(stored) for name, tensor in method.state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    _, again = lycoris(fresh, flux_config, f"algo={algo}", network_weights=str(tmp_path / "a.safetensors"))
    for name, tensor in again.state_dict().items():  # full is the difference of two sums
        torch.testing.assert_close(tensor.float(), tensors[name].float(), rtol=0, atol=1e-6)


def test_weights_are_in_the_order_that_the_package_expects(flux_like, flux_config):
    """Models whose convolutions are faster channels last change that of what is inside them, too."""
    parts, method = lycoris(flux_like, flux_config, "algo=glora")
    for parameter in method.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    method.train()
    assert all(parameter.is_contiguous() for parameter in method.parameters())


@pytest.mark.parametrize("precision", [{}, {"full_fp16": True, "mixed_precision": "fp16"}])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_whole_matrices_of_lokr_come_back_from_a_file_of_any_alpha(flux_like, flux_config, stored, precision):
    untouched = copy.deepcopy(flux_like)

    def attached(like, rank):
        family, parts = like
        args = ["algo=lokr", "factor=2"]
        config = flux_config(network_module="lycoris.kohya", network_dim=rank, network_args=args, **precision)
        return methods.attach_method(parts, family, config)

    state = {name: tensor.to(stored) for name, tensor in attached(flux_like, 100_000).state_dict().items()}
    alphas = [tensor for name, tensor in state.items() if name.endswith(".alpha")]
    assert alphas and all((alpha == (float("inf") if stored == torch.float16 else 1e5)) for alpha in alphas)
    again = attached(untouched, 50_000)
    assert not again.load_state_dict(state)
    assert {adapter.scale for adapter in again.network.loras} == {1.0}
    assert all(torch.isfinite(tensor).all() for tensor in again.state_dict().values())


@pytest.mark.parametrize("stored", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "args",
    [
        ["algo=dylora", "block_size=2"],
        ["algo=glora", "rs_lora=True"],
        ["algo=lokr", "factor=2", "full_matrix=True", "rs_lora=True"],
        ["algo=loha", "rs_lora=True"],
    ],
)
def test_a_file_has_the_strength_that_was_trained(flux_like, flux_config, args, stored):
    untouched = copy.deepcopy(flux_like)
    _, method = lycoris(flux_like, flux_config, *args, network_alpha=3)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.copy_(parameter.bfloat16() + (torch.randn_like(parameter) * 0.1).bfloat16())
    state = method.train(False).state_dict(stored)
    for adapter in method.network.loras:
        layer, name = adapter.org_module[0], f"{method.file_names[adapter.lora_name]}."
        parts = {TENSOR_ROLES[key.removeprefix(name)]: one for key, one in state.items() if key.startswith(name)}
        x = torch.randn(2, layer.in_features)
        with torch.no_grad():
            change = LayerChange(parts).ready().delta(layer.weight)
            torch.testing.assert_close(
                layer(x),
                nn.functional.linear(x, layer.weight + change, layer.bias),
                rtol=2e-2 if stored else 1e-4,
                atol=2e-2 if stored else 1e-5,
            )
    again = lycoris(untouched, flux_config, *args, network_alpha=3)[1]
    assert not again.load_state_dict(state)
    assert all(torch.equal(one, state[key]) for key, one in again.state_dict(stored).items())


def test_presets_find_layers_or_are_refused(flux_config, sdxl_config):
    for preset, said in (
        ("ia3", "finds no layer of any model: write preset=attn-mlp with algo=ia3"),
        ("unet-convblock-only", "FLUX.1.* has none: write preset=full"),
    ):
        config = flux_config(network_module="lycoris.kohya", network_args=[f"preset={preset}"])
        (problem,) = methods.find_method_problems(config)
        assert re.search(said, str(problem))
    config = sdxl_config(network_module="lycoris.kohya", network_args=["preset=unet-convblock-only"])
    assert not [*methods.find_method_problems(config)]


@pytest.mark.parametrize("script", [LORAS[0], LORAS[1], LORAS[-1]])
def test_every_preset_that_is_offered_adapts_something(script):
    for preset in network_args.LAYER_PRESETS:
        values = {"network_module": "lycoris.kohya", "network_args": [f"preset={preset}"]}
        subject = subjects.FamilySubject(script, values, "tiny")
        config = subject.config({})
        if not [*methods.find_method_problems(config)]:
            assert subject.make(config, torch.device("cpu")).method.parameters(), preset


def test_an_infinite_alpha_that_counts_is_named(flux_like, flux_config):
    _, method = lycoris(flux_like, flux_config, "algo=lora")
    state = method.state_dict()
    name = next(name for name in state if name.endswith(".alpha"))
    with pytest.raises(ConfigError, match=f"{name} of the file is infinite"):
        method.load_state_dict({**state, name: torch.tensor(float("inf"))})


PRESET = """
unet_target_module = ["SingleStreamBlock"]
text_encoder_target_module = []
enable_conv = false
"""


def test_a_preset_in_a_file_is_read_by_nobody_but_us(flux_like, flux_config, tmp_path, monkeypatch):
    kohya = importlib.import_module("lycoris.kohya")

    def opened(path):
        raise AssertionError(f"the package has opened {path}")

    monkeypatch.setattr(kohya, "read_preset", opened)
    (tmp_path / "mine.toml").write_text(PRESET)
    presets_before = set(kohya.PRESET)
    _, method = lycoris(flux_like, flux_config, f"preset={tmp_path / 'mine.toml'}")
    assert all(adapter.lora_name.startswith("lora_unet_single_blocks") for adapter in method.network.loras)
    assert set(kohya.PRESET) == presets_before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = " + "[" * 60 + "]" * 60, "more than 50 levels deep"),
        ("x = 1\n" * 2, "is not valid TOML"),
        ("# " + "x" * 1_000_001, "at most 1,000,000 are read"),
        ("unet_target = ['x']", "is not a preset of LyCORIS"),
    ],
)
def test_what_is_wrong_with_a_file_of_a_preset_is_reported(flux_like, flux_config, tmp_path, text, said):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        lycoris(flux_like, flux_config, f"preset={tmp_path / 'mine.toml'}")
    assert str(caught.value).startswith("in network_args: preset: ") and "mine.toml" in str(caught.value)
