import pytest
import torch
from safetensors.torch import load_file, save_file

from library import methods
from library.config.problems import ConfigError
from library.methods import lora


def inputs():
    torch.manual_seed(3)
    return torch.randn(2, 5, 4), torch.randn(2, 3, 6)


def grown(method):
    """Give every adapter something to say."""
    torch.manual_seed(4)
    with torch.no_grad():
        for adapter in method.adapters.values():
            for p in lora.own_parameters(adapter):
                p.normal_(std=0.1)
    return method


def test_attach_freezes_the_model_and_starts_as_the_model(flux_like, flux_config):
    family, parts = flux_like
    before, names = parts.denoiser(*inputs()), set(parts.denoiser.state_dict())
    method = methods.attach_method(parts, family, flux_config(network_dim=4))
    assert torch.equal(parts.denoiser(*inputs()), before)
    assert names <= set(parts.denoiser.state_dict())
    assert method.trained_parts == {"clip_l": True, "denoiser": True}
    parts.denoiser(*inputs()).sum().backward()
    with_gradient = {n for n, p in parts.denoiser.named_parameters() if p.grad is not None}
    assert with_gradient and all(".lora_" in n for n in with_gradient)
    learning = {id(p) for p in method.parameters()}
    everything = [parts.denoiser, *parts.encoders.values()]
    assert {id(p) for m in everything for p in m.parameters() if p.requires_grad} == learning


def test_names_shapes_and_order_of_the_file(flux_like, flux_config):
    family, parts = flux_like
    state = methods.attach_method(parts, family, flux_config(network_dim=4)).state_dict()
    assert list(state)[:3] == [
        f"lora_te1_text_model_0_q_proj.{k}" for k in ("lora_down.weight", "lora_up.weight", "alpha")
    ]
    assert state["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"].shape == (4, 8)
    assert state["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"].shape == (24, 4)
    alpha = state["lora_unet_single_blocks_2_modulation_lin.alpha"]
    assert alpha.dtype == torch.int64 and alpha.shape == ()  # the default, as sd-scripts writes it
    assert not any("img_in" in name or "te3" in name for name in state)


def test_alpha_zero_is_the_rank_and_none_is_rank_four(flux_like, flux_config):
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(network_alpha=0))
    adapter = method.adapters["lora_unet_single_blocks_0_linear1"]
    assert (adapter.rank, adapter.alpha, adapter.scale.item()) == (4, 4, 1.0)


@pytest.mark.parametrize("args", [[], ["split_qkv=True"]])
def test_saved_and_loaded_is_the_same_bit_for_bit(flux_like, flux_config, tmp_path, args):
    family, parts = flux_like
    config = flux_config(network_dim=3, network_alpha=2.0, network_args=args)
    method = grown(methods.attach_method(parts, family, config))
    expected, path = parts.denoiser(*inputs()), tmp_path / "a.safetensors"
    save_file(method.state_dict(), path)
    method.load_state_dict({k: v * 0 for k, v in load_file(path).items()})
    assert not torch.equal(parts.denoiser(*inputs()), expected)
    assert not method.load_state_dict(load_file(path))
    assert torch.equal(parts.denoiser(*inputs()), expected)
    state = method.state_dict()
    assert all(torch.equal(state[k], v) and state[k].dtype == v.dtype for k, v in load_file(path).items())


@pytest.mark.parametrize("module, args", [(None, ["split_qkv=True"]), ("lycoris.kohya", ["algo=full"])])
def test_a_snapshot_comes_back_bit_for_bit(flux_like, flux_config, module, args):
    family, parts = flux_like
    method = methods.attach_method(
        parts, family, flux_config(network_module=module, network_args=args, text_encoder_lr=[0])
    )
    taken = {name: tensor.clone() for name, tensor in method.snapshot().items()}
    with torch.no_grad():
        for p in method.parameters():
            p.add_(1)
    assert not all(torch.equal(t, taken[n]) for n, t in method.snapshot().items())
    method.restore(taken)
    assert all(torch.equal(t, taken[n]) for n, t in method.snapshot().items())
    with pytest.raises(ConfigError, match="other networks"):
        method.restore({n: t for n, t in taken.items() if "single" not in n})


def test_the_files_own_ranks_and_alphas(flux_like, flux_config, tmp_path):
    family, parts = flux_like
    first = grown(methods.attach_method(parts, family, flux_config(network_dim=3, network_alpha=2.0)))
    expected = parts.denoiser(*inputs())
    state = {k: v for k, v in first.state_dict().items() if "single_blocks_2" not in k}
    state["lora_unet_double_blocks_0_img_mlp_0.lora_down.weight"] = torch.randn(5, 8)
    state["lora_unet_double_blocks_0_img_mlp_0.lora_up.weight"] = torch.zeros(32, 5)
    del state["lora_unet_double_blocks_0_img_mlp_0.alpha"]  # old files: alpha is the rank
    save_file(state, path := tmp_path / "a.safetensors")
    again = flux_like[0], type(parts)(**{**vars(parts), "denoiser": type(parts.denoiser)(), "encoders": {}})
    again[1].denoiser.load_state_dict(base(parts.denoiser))
    second = methods.attach_method(again[1], family, flux_config(network_weights=str(path), dim_from_weights=True))
    assert "lora_unet_single_blocks_2_linear1" not in second.adapters
    odd = second.adapters["lora_unet_double_blocks_0_img_mlp_0"]
    assert (odd.rank, odd.alpha) == (5, 5.0)
    assert second.adapters["lora_unet_double_blocks_0_img_mod_lin"].alpha == 2.0
    assert not torch.equal(again[1].denoiser(*inputs()), expected)


def base(denoiser):
    return {k: v for k, v in denoiser.state_dict().items() if ".lora_" not in k}


def test_network_weights_of_another_rank_is_a_sentence(flux_like, flux_config, tmp_path):
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(network_dim=3))
    with pytest.raises(ConfigError, match="rank 8 in the file and 3 here.*dim_from_weights"):
        method.load_state_dict(
            {k: torch.zeros(8, 8) for k in method.state_dict() if k.endswith("0_q_proj.lora_down.weight")}
            | {"lora_te1_text_model_0_q_proj.lora_up.weight": torch.zeros(8, 8)}
        )
    unmatched = method.load_state_dict({"lora_unet_nowhere.lora_down.weight": torch.zeros(3, 3)})
    assert unmatched.unexpected == ["lora_unet_nowhere"] and len(unmatched.missing) == len(method.adapters)


def test_names_of_diffusers_and_of_compiled_models_are_read(flux_like, flux_config):
    family, parts = flux_like
    family.prefixes = {**family.prefixes, "denoiser": "lora_unet_renamed"}
    method = methods.attach_method(parts, family, flux_config(network_train_unet_only=True))
    state = {k.replace("lora_unet_renamed", "lora_unet__orig_mod"): v for k, v in method.state_dict().items()}
    assert not method.load_state_dict(state)


def test_base_weights_are_merged_in_float32(flux_like, flux_config, tmp_path):
    family, parts = flux_like
    method = grown(methods.attach_method(parts, family, flux_config(network_dim=3, network_train_unet_only=True)))
    method.set_multiplier(0.5)
    expected = parts.denoiser(*inputs())
    save_file(method.state_dict(), path := tmp_path / "a.safetensors")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        denoiser = type(parts.denoiser)()
        denoiser.load_state_dict(base(parts.denoiser))
        fresh = type(parts)(**{**vars(parts), "denoiser": denoiser.to(dtype)})
        config = flux_config(base_weights=[str(path)], base_weights_multiplier=[0.5], network_train_unet_only=True)
        methods.attach_method(fresh, family, config)
        actual = fresh.denoiser.float()(*inputs())
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("option", ["base_weights", "network_weights"])
@pytest.mark.parametrize("key", ["lora_up.weight", "lora_down.weight", "alpha"])
def test_a_file_for_layers_of_another_size_is_a_sentence(flux_like, flux_config, tmp_path, option, key):
    """As a LoRA of FLUX.2 klein 9B is for klein 4B, or a damaged file."""
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(network_dim=3, network_train_unet_only=True))
    state = dict(method.state_dict())
    name = next(name for name in state if name.endswith(key))
    state[name] = torch.ones(2, 3) if key == "alpha" else torch.cat([state[name]] * 2, dim=int("down" in key))
    save_file(state, path := tmp_path / "a.safetensors")
    fresh = type(parts)(**{**vars(parts), "denoiser": type(parts.denoiser)()})
    options = {option: [str(path)] if option == "base_weights" else str(path)}
    with pytest.raises(ConfigError, match="another size than this model's layer") as error:
        methods.attach_method(fresh, family, flux_config(network_dim=3, network_train_unet_only=True, **options))
    assert error.value.problems[0].option == option


def test_norms_are_limited_without_leaving_the_device(flux_like, flux_config):
    family, parts = flux_like
    method = grown(methods.attach_method(parts, family, flux_config(network_dim=3, network_alpha=3.0)))
    before = {n: a.product_norm().item() for n, a in method.adapters.items()}
    limit = sorted(before.values())[len(before) // 2]
    told = method.limit_norms(limit)
    after = {n: a.product_norm().item() for n, a in method.adapters.items()}
    assert all(after[n] == pytest.approx(min(norm, limit), rel=1e-4) for n, norm in before.items())
    assert told["keys_scaled"] == sum(norm > limit * (1 + 1e-6) for norm in before.values())
    assert told["maximum"].item() == pytest.approx(limit) and isinstance(told["average"], torch.Tensor)
    assert told["average"].item() == pytest.approx(sum(after.values()) / len(after), rel=1e-4)
    told = method.limit_norms(100 * limit)  # norms far below the limit are reported as they are
    assert told["keys_scaled"] == 0 and told["maximum"].item() == pytest.approx(limit, rel=1e-4)


def test_rates_and_order_of_groups(flux_like, flux_config):
    family, parts = flux_like
    config = flux_config(
        unet_lr=1e-4, text_encoder_lr=[1e-5, 2e-5], network_args=["train_t5xxl=True", "loraplus_unet_lr_ratio=4"]
    )
    groups = methods.attach_method(parts, family, config).groups()
    assert [(g["name"], g["lr"]) for g in groups] == [
        ("textencoder 1", 1e-5),
        ("textencoder 2", 2e-5),
        ("unet", 1e-4),
        ("unet plus", 4e-4),
    ]


@pytest.mark.parametrize("rates, expected", [([], (1e-3, 1e-3)), ([1e-5], (1e-5, 1e-5)), ([1e-5, 2e-5], (1e-5, 2e-5))])
def test_one_rate_of_text_encoders_is_for_all_of_them(flux_like, flux_config, rates, expected):
    family, parts = flux_like
    config = flux_config(text_encoder_lr=rates, network_args=["train_t5xxl=True"])
    groups = {group["name"]: group["lr"] for group in methods.attach_method(parts, family, config).groups()}
    assert (groups["textencoder 1"], groups["textencoder 2"]) == expected


@pytest.mark.parametrize(
    "options, names",
    [
        ({}, ["textencoder 1", "unet"]),
        ({"text_encoder_lr": [0]}, ["unet"]),
        ({"unet_lr": 0}, ["textencoder 1"]),
        ({"network_train_unet_only": True}, ["unet"]),
        ({"network_train_text_encoder_only": True}, ["textencoder 1"]),
        (
            {"network_args": ["network_reg_lrs=single_.*linear=1e-5,_mod_=0"]},
            ["textencoder 1", "unet", "unet reg_lr_0"],
        ),
    ],
)
def test_a_rate_of_zero_leaves_a_group_out_but_not_the_file(flux_like, flux_config, options, names):
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(**options))
    assert [g["name"] for g in method.groups()] == names
    learning = {id(p) for g in method.groups() for p in g["params"]}
    own = [p for a in method.adapters.values() for p in lora.own_parameters(a)]
    assert all(p.requires_grad == (id(p) in learning) for p in own)
    assert any(n.startswith("lora_te1") for n in method.adapters) == ("network_train_unet_only" not in options)
    assert method.trained_parts.get("clip_l", False) == ("textencoder 1" in names)


def test_nothing_that_learns_is_an_error(flux_like, flux_config):
    family, parts = flux_like
    with pytest.raises(ConfigError, match="nothing is trained"):
        methods.attach_method(parts, family, flux_config(learning_rate=0))


def ranks(flux_like, flux_config, *args, **options):
    family, parts = flux_like
    config = flux_config(network_dim=4, network_train_unet_only=True, network_args=list(args), **options)
    adapters = methods.attach_method(parts, family, config).adapters
    return {name.removeprefix("lora_unet_"): adapter.spec.rank for name, adapter in adapters.items()}


def test_flux_ranks_by_type(flux_like, flux_config):
    ranks_by_name = ranks(
        flux_like, flux_config, "img_attn_dim=2", "txt_attn_dim=0", "single_dim=5", "single_mod_dim=6"
    )
    assert ranks_by_name["double_blocks_0_img_attn_qkv"] == 2 and ranks_by_name["double_blocks_1_img_attn_proj"] == 2
    assert not any("txt_attn" in name for name in ranks_by_name)
    assert ranks_by_name["single_blocks_1_linear2"] == 5 and ranks_by_name["single_blocks_1_modulation_lin"] == 6
    assert ranks_by_name["double_blocks_0_img_mlp_0"] == 4 and ranks_by_name["double_blocks_0_img_mod_lin"] == 4


def test_flux_blocks_by_number_and_kind(flux_like, flux_config):
    ranks_by_name = ranks(flux_like, flux_config, "train_double_block_indices=none", "train_single_block_indices=0,2-5")
    assert {name.rsplit("_blocks_")[1][0] for name in ranks_by_name} == {"0", "2"} and not any(
        "double" in n for n in ranks_by_name
    )


def test_flux_blocks_of_one_kind(flux_like, flux_config):
    assert all(n.startswith("single") for n in ranks(flux_like, flux_config, "train_blocks=single"))


def test_flux_embedders_and_patterns(flux_like, flux_config):
    patterns = "network_reg_dims=single_blocks_1_=7,img_attn_(qkv|proj)=0"
    ranks_by_name = ranks(flux_like, flux_config, "in_dims=[3,0,0,0,2]", patterns, "train_single_block_indices=none")
    assert (ranks_by_name["img_in"], ranks_by_name["txt_in"]) == (3, 2)
    assert {n for n in ranks_by_name if n.startswith("single")} == {
        "single_blocks_1_linear1",
        "single_blocks_1_linear2",
        "single_blocks_1_modulation_lin",
    }
    assert ranks_by_name["single_blocks_1_linear1"] == 7 and "double_blocks_0_img_attn_qkv" not in ranks_by_name


def test_split_adapters_sit_on_the_fused_matrices_only(flux_like, flux_config):
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(network_dim=2, network_args=["split_qkv=True"]))
    split = {n: a.spec.split for n, a in method.adapters.items() if a.spec.split}
    assert split["lora_unet_double_blocks_0_txt_attn_qkv"] == (8, 8, 8)
    assert split["lora_unet_single_blocks_0_linear1"] == (8, 8, 8, 32)
    assert len(split) == 2 * 2 + 3
    state = method.state_dict()
    assert state["lora_unet_single_blocks_0_linear1.alpha"] == 4
    assert state["lora_unet_single_blocks_0_linear1.lora_down.weight"].shape == (8, 8)


def test_half_precision_adapters_are_opt_in(flux_like, flux_config):
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(full_bf16=True, mixed_precision="bf16"))
    assert {p.dtype for p in method.parameters()} == {torch.bfloat16}
    assert method.adapters["lora_unet_single_blocks_0_linear1"].scale.dtype == torch.float32
    assert {t.dtype for t in method.state_dict(torch.float16).values()} == {torch.float16}


@pytest.mark.slow
def test_blocks_share_graphs(flux_like, flux_config):
    import torch._dynamo.testing

    torch._dynamo.reset()
    family, parts = flux_like
    method = methods.attach_method(parts, family, flux_config(network_dim=4))
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    for block in [*parts.denoiser.double_blocks, *parts.denoiser.single_blocks]:
        block.compile(backend=counter, fullgraph=True)
    img, txt = (x.requires_grad_(True) for x in inputs())
    for multiplier in (1.0, 0.0, 0.7):
        method.set_multiplier(multiplier)
        parts.denoiser(img, txt).sum().backward()
    assert counter.frame_count == 2
