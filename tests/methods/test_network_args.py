from types import SimpleNamespace

import pytest

from library import families, methods
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families import network_args
from library.families.sdxl.network_args import block_number
from library.families.shared import network_args as languages


def wrong(config):
    return list(methods.find_method_problems(config))


def test_everything_wrong_is_reported_at_once(flux_config):
    config = flux_config(
        network_args=[
            "trian_blocks=single",
            "img_attn_dim=four",
            "rank_dropout=2",
            "in_dims=[1,2]",
            "split_qkv",
            "train_single_block_indices=5-3",
            "network_reg_dims=(=4",
            "dropout=0.1",
        ]
    )
    said = wrong(config)
    assert len(said) == 8
    parts = (
        "key=value",
        "train_blocks?",
        "a whole number",
        "at most",
        "--network_dropout",
        "five",
        "0-3,5",
        "regex=rank",
    )
    for part in parts:
        assert any(part in str(s) for s in said), (part, said)
    with pytest.raises(ConfigError):
        network_args.read_network_args(config)


def test_the_module_must_fit_the_family(flux_config, sdxl_config):
    assert "networks.lora_flux" in str(wrong(flux_config(network_module="networks.lora"))[0])
    assert "networks.lora or" in str(wrong(sdxl_config(network_module="networks.lora_flux"))[0])
    assert "algo=dylora" in str(wrong(sdxl_config(network_module="networks.dylora"))[0])
    assert "names the package nowhere" in str(wrong(sdxl_config(network_module="nowhere.net"))[0])
    assert not wrong(sdxl_config()) and not wrong(flux_config())


@pytest.mark.parametrize(
    ("args", "values", "words"),
    [
        (("module_dropout=0.1",), {"compile": True}, "module_dropout of LyCORIS cannot be compiled"),
        (("algo=dylora",), {"compile": True}, "cannot be used with compile"),
        (("algo=DyLoRA",), {"blocks_to_swap": 2}, "cannot be used with gradient_checkpointing or blocks_to_swap"),
        (("algo=dylora", "module_dropout=0.1"), {}, None),
        (("algo=lokr", "rank_dropout=0.1"), {"compile": True, "gradient_checkpointing": True}, None),
    ],
)
def test_what_lycoris_draws_while_it_computes_cannot_be_compiled_or_computed_again(flux_config, args, values, words):
    pytest.importorskip("lycoris")
    said = wrong(flux_config(network_module="lycoris.kohya", network_args=args, **values))
    assert words in str(said[0]) if words else not said


def lycoris(made, *args, **values):
    return made(network_module="lycoris.kohya", network_args=args, **values)


def test_what_lycoris_fails_at_later_is_refused_at_once(flux_config, sdxl_config):
    pytest.importorskip("lycoris")
    for algo in ("dylora", "full"):
        assert f"cannot be used with algo={algo}" in str(
            wrong(lycoris(flux_config, f"algo={algo}", "bypass_mode=True"))[0]
        )
    turning = ("algo=diag-oft", "bypass_mode=True")
    assert "dropout" in str(wrong(lycoris(flux_config, *turning, network_dropout=0.1))[0])
    assert not wrong(lycoris(flux_config, *turning))
    assert "algo=tlora needs the timestep" in str(wrong(lycoris(sdxl_config, "algo=tlora"))[0])


def test_dropout_that_lycoris_leaves_out_is_noted_once(flux_config):
    pytest.importorskip("lycoris")

    def said(*args, **values):
        return [str(note) for note in methods.method_notes(lycoris(flux_config, *args, **values))]

    assert said("algo=LoKr", "dropout=0.1") == [
        "network_args dropout has no effect with algo=lokr unless network_args has bypass_mode=True, too"
    ]
    assert said("algo=boft", network_dropout=0.1) == [
        "network_dropout has no effect with algo=boft, which has no dropout: leave it out"
    ]
    assert not said("algo=lokr", "dropout=0.1", "bypass_mode=True") and not said("algo=lokr", "dropout=0")


def test_rank_dropout_is_noted_where_the_package_leaves_no_ranks_out(flux_config):
    """By what its modules answer twice."""
    torch = pytest.importorskip("torch")
    modules = pytest.importorskip("lycoris.wrapper").network_module_dict
    for algo in ("locon", "loha", "lokr", "diag-oft", "boft", "glora", "full", "dylora", "ia3"):
        for bypass in (False, True):
            args = (f"algo={algo}", "rank_dropout=0.5", f"bypass_mode={bypass}")
            said = (
                [str(note) for note in methods.method_notes(lycoris(flux_config, *args))]
                if not (wrong(lycoris(flux_config, *args)))
                else None
            )
            if said is None:
                continue
            torch.manual_seed(0)
            adapter = modules[algo]("a", torch.nn.Linear(64, 64), 1.0, 4, 4, 0.0, 0.5, 0.0, bypass_mode=bypass)
            for parameter in adapter.parameters():
                parameter.data = torch.randn_like(parameter)
            tokens = torch.randn(1, 64)
            answers = {tuple(adapter.train()(tokens)[0].tolist()) for _ in range(3)}
            assert bool(said) == (algo == "dylora" or len(answers) == 1), (algo, bypass, said)


def test_files_that_are_not_there(sdxl_config):
    config = sdxl_config(network_weights="no.safetensors", base_weights=["nor_this.safetensors"])
    assert [*map(str, wrong(config))] == [
        "network_weights: no.safetensors does not exist",
        "base_weights: nor_this.safetensors does not exist",
    ]


def test_block_weights_of_sdxl(sdxl_config):
    def weights(*args):
        return network_args.read_network_args(sdxl_config(network_args=list(args))).block_weights

    assert weights() == ()
    assert weights("mid_lr_weight=0.5,0.5,0.5") == (*[1.0] * 10, 0.5, 0.5, 0.5, *[1.0] * 10)
    linear = weights("down_lr_weight=linear+.25", "up_lr_weight=zeros", "block_lr_zero_threshold=0.3")
    assert linear[1:4] == (0.0, 0.375, 0.5) and linear[9] == 1.25 and not any(linear[13:22])
    assert weights("down_lr_weight=sine")[9] == pytest.approx(1) and weights("up_lr_weight=cosine")[13] == 1
    said = wrong(
        sdxl_config(network_args=["down_lr_weight=1,1", "block_dims=4,4", "conv_block_alphas=" + "1," * 22 + "1"])
    )
    assert (
        len(said) == 3 and "needs 9 numbers" in "".join(map(str, said)) and "needs 23 values" in "".join(map(str, said))
    )


@pytest.mark.parametrize(("typed", "meant"), [("network.lora", "networks.lora"), ("lycoriss.kohya", "lycoris.kohya")])
def test_a_misspelt_module_gets_a_proposal(sdxl_config, typed, meant):
    (said,) = wrong(sdxl_config(network_module=typed))
    assert str(said) == f"network_module {typed} is not known (did you mean {meant}?)"


@pytest.mark.parametrize("text", [*languages.SHAPES, "cosine+.25", "1,1,1", "x"])
def test_the_one_middle_block_of_sd15_takes_a_single_number(text):
    """Shapes spread over several blocks, and would divide by zero."""
    with pytest.raises(ConfigError, match="must be one number, got"):
        languages.block_factors(text, 1)
    assert languages.block_factors("0.5", 1) == [0.5] and languages.block_factors("", 1) == [1.0]


def test_patterns_may_hold_commas_and_equal_signs():
    patterns = languages.patterns(r"a{1,2}=4, (?=x)single=8", int)
    assert patterns == (("a{1,2}", 4), ("(?=x)single", 8))
    assert languages.patterns("double=1e-4", float) == (("double", 1e-4),)
    assert languages.indices("0-2,7") == {0, 1, 2, 7} and languages.indices("all") is None


def test_what_has_no_effect_is_noted(flux_config, sdxl_config):
    assert "no convolutions" in str(next(methods.method_notes(flux_config(network_args=["conv_dim=4"]))))
    assert "without conv_dim" in str(next(methods.method_notes(sdxl_config(network_args=["conv_alpha=4"]))))
    threshold = next(methods.method_notes(sdxl_config(network_args=["block_lr_zero_threshold=0.1"])))
    assert "without down_lr_weight" in str(threshold)
    ratio = {"network_args": ["loraplus_text_encoder_lr_ratio=4"], "network_train_unet_only": True}
    assert [*map(str, methods.method_notes(flux_config(**ratio)))] == [
        "network_args loraplus_text_encoder_lr_ratio has no effect: network_train_unet_only is on"
    ]
    assert "the first one" in str(next(methods.method_notes(sdxl_config(text_encoder_lr=[1e-5, 2e-5]))))
    assert not list(methods.method_notes(flux_config(text_encoder_lr=[1e-5, 2e-5])))


@pytest.mark.parametrize(
    "name, block",
    [
        ("lora_unet_time_embed_0", 0),
        ("lora_unet_label_emb_0_0", 0),
        ("lora_unet_input_blocks_0_0", 1),
        ("lora_unet_input_blocks_8_1_proj_in", 9),
        ("lora_unet_middle_block_1_proj_in", 11),
        ("lora_unet_output_blocks_0_1_proj_in", 13),
        ("lora_unet_output_blocks_8_0_in_layers_2", 21),
        ("lora_unet_out_2", 22),
    ],
)
def test_block_numbers_of_sdxl(name, block):
    assert block_number(name) == block


def test_patterns_choose_layers_by_their_paths_as_in_musubi_tuner(flux_config):
    text = "exclude_patterns=['.*mlp.*', '.*_mod.*']"
    args = network_args.read_network_args(
        flux_config(network_args=[text, "include_patterns=['double_blocks.1.*mlp.*']"])
    )
    paths = {
        "double_blocks.0.img_attn.qkv": True,
        "double_blocks.0.img_mlp.0": False,
        "double_blocks.1.img_mlp.0": True,
        "double_blocks.0.txt_mod.lin": False,
    }
    for path, learns in paths.items():
        layer = SimpleNamespace(part="denoiser", path=path, name="lora_unet_" + path.replace(".", "_"), inside="x")
        assert (args.rank_of(layer, 4, 1.0) == (4, 1.0)) is learns, path
    assert languages.regexes("'.*mlp.*'") == (".*mlp.*",)  # one regex in quotes, as sd-scripts takes it
    for value in ("['(']", "mlp", "[1]"):
        (problem,) = wrong(flux_config(network_args=[f"exclude_patterns={value}"]))
        assert "must be a list of regexes like ['.*attn.*']" in str(problem)


@pytest.mark.parametrize("arguments", [["conv_dim=3"], [f"conv_block_dims={','.join(['3'] * 23)}"]])
def test_the_alpha_of_convolutions_is_a_float_in_files_as_in_sd_scripts(sdxl_config, arguments):
    args = network_args.read_network_args(sdxl_config(network_args=arguments))
    name = "lora_unet_input_blocks_1_0_in_layers_2"
    layer = SimpleNamespace(part="denoiser", name=name, inside="ResnetBlock2D", is_large_conv=True)
    rank, alpha = args.rank_of(layer, 4, 1)
    assert (rank, alpha, type(alpha)) == (3, 1, float)


BLOCKS = [
    (facts.name, name)
    for facts in families.all_families()
    for name in getattr(families.load_object([*facts.adapter_modules.values()][0].args), "block_arguments", ())
    if name.endswith("_block_indices")
]


def chosen(family, *pairs, **more):
    config = build_config(
        families.config_class(families.lora_script(family)), {"network_args": pairs, **more}, notes=[]
    )
    counts = [group.count for group in families.facts_of(family).blocks]
    return config, network_args.read_network_args(config).chosen_blocks(counts)


@pytest.mark.parametrize(("family", "name"), BLOCKS)
def test_an_empty_list_of_blocks_names_none_as_in_sd_scripts(family, name):
    every, none = chosen(family)[1], chosen(family, f"{name}=none")[1]
    config, empty = chosen(family, f"{name}=")
    assert empty == none != every
    (said,) = [str(note) for note in network_args.network_args_notes(config) if name in str(note)]
    assert f"{name} is empty, so none of these blocks learn" in said and f"write {name}=all" in said
    assert chosen(family, f"{name}=None")[1] == chosen(family, f"{name}=all")[1] == every
    assert not [note for note in network_args.network_args_notes(chosen(family, f"{name}=all")[0]) if name in str(note)]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_empty_list_of_blocks_of_lycoris_names_none(family):
    lycoris = {"network_module": "lycoris.kohya"}
    none = chosen(family, "train_block_indices=none", **lycoris)[1]
    assert chosen(family, "train_block_indices=", **lycoris)[1] == none != chosen(family, **lycoris)[1]


@pytest.mark.parametrize("text", ["0-99999999999", "9" * 5000, "0-3,1000"])
def test_numbers_beyond_all_blocks_are_refused_at_once(text):
    with pytest.raises(ConfigError, match="must be"):
        languages.indices(text)


def test_an_argument_of_very_many_characters_is_one_sentence(flux_config):
    config = flux_config(network_args=["train_single_block_indices=" + "0-99," * 50_000 + "1"])
    (problem,) = network_args.find_network_args_problems(config)
    assert "train_single_block_indices has 250,001 characters, and at most 20000 are read" in str(problem)
