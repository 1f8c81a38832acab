"""Modulation layers in host memory: the same numbers, fewer bytes on the device, one copy in each forward pass."""

import pytest
import torch

from library import families, methods
from library.check.estimate import estimate
from library.compiler.torch_settings import keep_torch_settings
from library.config import ineffective
from library.config.building import replace_options
from library.config.problems import ConfigError
from library.measuring.candidates import saving_memory
from library.memory import attention, modulation, swapping
from library.memory.modulation import modulation_layers
from library.memory.placement import plan_placement
from library.memory.prepare import prepare_denoiser, restored_after
from library.memory.quantization import fp8_matmul, fp8_storage
from tests import training

# The families that declare modulation layers, found in their options, so that a new one cannot be forgotten.
SCRIPTS = [script for script in training.LORAS if hasattr(families.config_class(script)().memory, "offload_modulation")]
EVERY_LAYER = {"flux_train_network": (), "qwen_image_train_network": ("train_modulation=True",)}
WAYS = {
    "eager": {},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded checkpoints": {"cpu_offload_checkpointing": True},
    "swapped": {"blocks_to_swap": 2},
    "4 bits": {"base_bits": 4, "mixed_precision": "bf16"},
    "fp8": {"fp8_base": True, "mixed_precision": "bf16"},
    "int8": {"int8_base": True, "mixed_precision": "bf16"},
    "dropout": {"network_dropout": 0.3, "gradient_checkpointing": True},
    "text encoders learn": {"network_train_unet_only": False, "cache_text_encoder_outputs": False},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "preserved": {"preserve_weight": 1.0, "preserve_prompt": "toy", "gradient_checkpointing": True},
    "only modulation learns": {"network_args": ("network_reg_dims=^(?!.*mod).*=0",), "gradient_checkpointing": True},
    "several images": {"train_batch_size": 3, "max_train_steps": 4},  # and the rest of an epoch
    "pictures": {"sample_every_n_steps": 1, "sample_steps": 2, "gradient_checkpointing": True},
}


def prepared(demo, script, **options):
    config = training.config_of(demo, script, **options)
    family = families.family_for(config)
    parts = family.load(fp8_storage.storage_type(config))
    methods.attach_method(parts, family, config)
    return config, family, parts.denoiser


def test_both_families_with_such_layers_are_tested():
    assert sorted(SCRIPTS) == sorted(EVERY_LAYER)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_and_files_are_the_same(demo, shapes, tmp_path, script, way):
    options = {"train_data_dir": shapes, "max_train_steps": 3, **WAYS[way]}
    options["network_args"] = (*EVERY_LAYER[script], *options.get("network_args", ()))
    if "sample_every_n_steps" in options:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("zorb toy --w 64 --h 64\n", encoding="utf-8")
        options["sample_prompts"] = prompts
    outcomes = [
        training.train(
            training.config_of(
                demo, script, **options, offload_modulation=offloads, output_dir=tmp_path / str(offloads)
            )
        )
        for offloads in (False, True)
    ]
    # A text encoder that learns gets gradients through the vector, which are added up in another order.
    tolerance = {"rel": 1e-6} if "learn" in way else {"rel": 0, "abs": 0}
    assert outcomes[1].losses == pytest.approx(outcomes[0].losses, **tolerance)
    kept, offloaded = (outcome.tensors() for outcome in outcomes)
    assert kept.keys() == offloaded.keys() and any("mod" in name for name in kept)
    if "learn" not in way:
        assert all(torch.equal(kept[name], offloaded[name]) for name in kept)


@pytest.mark.parametrize("script", SCRIPTS)
def test_blocks_compile_as_one_graph_and_are_not_compiled_again(demo, shapes, tmp_path, script):
    compiled = {"compile": True, "compile_fullgraph": True, "compile_warmup": "true"}
    options = {"train_data_dir": shapes, "max_train_steps": 4, **WAYS["only modulation learns"], **compiled}
    options["network_args"] = (*EVERY_LAYER[script], *options["network_args"])

    def run(offloads):
        config = training.config_of(
            demo,
            script,
            **options,
            compile_backend="aot_eager" if offloads else "eager",  # backward passes are traced of what is offloaded
            offload_modulation=offloads,
            output_dir=tmp_path / str(offloads),
        )
        return training.train(config)

    kept, offloaded = run(False), run(True)
    assert offloaded.losses == pytest.approx(kept.losses, rel=1e-6)
    graphs = [outcome.facts["compile"] for outcome in (kept, offloaded)]
    assert graphs[0]["graphs"] == graphs[1]["graphs"] and not graphs[1]["recompiles"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_wait_on_the_host_and_are_copied_once_in_a_forward_pass(demo, script, monkeypatch):
    config, family, denoiser = prepared(demo, script, offload_modulation=True, gradient_checkpointing=True)
    plan, device = family.modulation, torch.device("cpu")
    blocks = [block for block in denoiser.modules() if type(block).__name__ in plan]
    layers = [layer for block in blocks for layer in modulation_layers(block, plan)]
    classes, copied = [type(layer) for layer in layers], []
    fill = swapping._Slots.fill
    monkeypatch.setattr(swapping._Slots, "fill", lambda self, packed: copied.append(packed.block) or fill(self, packed))
    with keep_torch_settings(), attention.keep_attention_settings(), restored_after(denoiser, family):
        prepare_denoiser(denoiser, family, config, device, ((1, 8, 8),))
        vec = torch.randn(1, layers[0].in_features)
        for block in blocks:
            offloaded = vars(block)[swapping.MODULATION]
            own = modulation_layers(block, plan)
            expected = torch.cat([layer.whole_product(torch.nn.functional.silu(vec)) for layer in own], dim=-1)
            args = offloaded.add_products(block, [None] * plan[type(block).__name__].argument + [vec])
            assert torch.equal(args[-1], torch.cat((vec, expected), dim=-1))
        assert copied == blocks, "each block once"
        assert len({p.untyped_storage().data_ptr() for p in offloaded.weights}) == len(blocks)
    assert [type(layer) for layer in layers] == classes and not hasattr(layers[0], "place_of_product")
    assert all(type(block).__name__ in plan and swapping.MODULATION not in vars(block) for block in blocks)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_vector_that_learns_gets_its_gradient_and_weights_are_copied_once_more(demo, script, monkeypatch):
    """In the backward pass blocks come in reverse, so the two that are still on the device are not copied again."""
    config, family, denoiser = prepared(demo, script, offload_modulation=True, gradient_checkpointing=True)
    plan, copied = family.modulation, []
    blocks = [block for block in denoiser.modules() if type(block).__name__ in plan]
    fill = swapping._Slots.fill
    monkeypatch.setattr(swapping._Slots, "fill", lambda self, packed: copied.append(packed.block) or fill(self, packed))
    layers = [layer for block in blocks for layer in modulation_layers(block, plan)]
    vec = torch.randn(2, layers[0].in_features, requires_grad=True)
    sum(getattr(layer, "base", layer)(torch.nn.functional.silu(vec)).sum() for layer in layers).backward()
    expected, vec.grad = vec.grad, None
    with keep_torch_settings(), attention.keep_attention_settings(), restored_after(denoiser, family):
        prepare_denoiser(denoiser, family, config, torch.device("cpu"), ((1, 8, 8),))
        outputs = []
        for block in blocks:
            args = [None] * plan[type(block).__name__].argument + [vec]
            outputs.append(vars(block)[swapping.MODULATION].add_products(block, args)[-1][:, vec.shape[1] :])
        sum(output.sum() for output in outputs).backward()
    assert copied == [*blocks, *blocks[-3::-1]]
    assert torch.allclose(vec.grad, expected, rtol=1e-4, atol=1e-6)


LYCORIS = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}
RECORDED, WHOLE = {"cuda_graphs": "true"}, {"compile": True, "compile_scope": "model"}
REFUSED = {  # ways -> the kind of training, its options, and the one sentence about them
    "LyCORIS": ("_network", LYCORIS, "offload_modulation cannot be used with LyCORIS"),
    "LyCORIS, recorded": ("_network", LYCORIS | RECORDED, "offload_modulation cannot be used with LyCORIS"),
    "fine-tune": ("", {}, "offload_modulation is for adapters, as a fine-tune trains these layers"),
    "fine-tune, recorded": ("", RECORDED, "offload_modulation is for adapters"),
    "fine-tune as one graph": ("", WHOLE, "offload_modulation is for adapters"),
    "recorded": ("_network", RECORDED, "needs weights at fixed addresses, and offload_modulation moves them"),
    "as one graph": ("_network", WHOLE, "compile_scope = model cannot be used with offload_modulation"),
}


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_cannot_be_offloaded_is_refused_in_a_sentence_with_a_fix(demo, script, way):
    kind, options, sentence = REFUSED[way]
    script = script.removesuffix("_network") + kind
    with pytest.raises(ConfigError, match=sentence) as refused:
        training.config_of(demo, script, offload_modulation=True, **options)
    (problem,) = refused.value.problems
    training.config_of(demo, script, **{"offload_modulation": True, **options, **problem.fix})


def test_chroma_has_nothing_to_offload(demo):
    """Whatever else it says, an option without effect forbids nothing."""
    chroma = {"model_type": "chroma", "apply_t5_attn_mask": True, "offload_modulation": True}
    for options in (RECORDED, WHOLE, LYCORIS):
        config = training.config_of(demo, "flux_train_network", **chroma, **options)
        (remark,) = (remark for remark in ineffective.remarks(config, ()) if remark.option == "offload_modulation")
        assert str(remark) == "offload_modulation has no effect here: the blocks of Chroma have no modulation layers"
        assert remark.fix == {"offload_modulation": False} and not config.memory.moves_weights(config)


@pytest.mark.parametrize("options", [{}, RECORDED, WHOLE, LYCORIS, {"checkpoint_keep_attention": True}])
def test_less_memory_is_proposed_only_in_ways_that_the_other_options_allow(demo, options):
    config = training.config_of(demo, "flux_train_network", **options)
    proposed = [*saving_memory(config)]
    assert all(replace_options(config, **changes) for changes in proposed)
    assert ({"offload_modulation": True} in proposed) == (options in ({}, {"checkpoint_keep_attention": True}))


@pytest.mark.parametrize(("script", "share"), [("flux_train_network", 0.27), ("qwen_image_train_network", 0.33)])
def test_the_estimate_counts_what_leaves_the_gpu(demo, tmp_path, script, share):
    kept, offloaded, swapped = (
        estimate(
            training.config_of(
                demo,
                script,
                pretrained_model_name_or_path=tmp_path / "none",
                fp8_base=True,
                mixed_precision="bf16",
                **more,
            ),
            (1024, 1024),
            "NVIDIA H200",
            141.0,
        )
        for more in ({}, {"offload_modulation": True}, {"offload_modulation": True, "blocks_to_swap": 8})
    )
    assert 1 - offloaded.parts["model"] / kept.parts["model"] == pytest.approx(share, abs=0.03)
    assert swapped.parts["model"] < offloaded.parts["model"]
    assert kept.step < offloaded.step < swapped.step


@pytest.mark.parametrize("base", [{}, {"fp8_base": True}, {"int8_base": True}, {"fp8_base": True, "fp8_compute": True}])
@pytest.mark.parametrize("script", SCRIPTS)
def test_all_layers_of_a_block_are_one_product_on_a_gpu(demo, script, base, monkeypatch):
    """On a CPU the layers stay apart, so it is told to join them."""
    monkeypatch.setattr(modulation, "JOINED_ON", {"cpu"})
    monkeypatch.setattr(fp8_matmul, "supports_fp8", lambda device: True)
    monkeypatch.setattr(swapping.Swap, "use", lambda self, index, forward: fetched.append(self.blocks[index].block))
    options = {"offload_modulation": True, "gradient_checkpointing": True, "mixed_precision": "bf16", **base}
    config, family, denoiser = prepared(demo, script, **options, **({"compile": True} if "fp8_compute" in base else {}))
    fetched = []
    with keep_torch_settings(), attention.keep_attention_settings(), restored_after(denoiser, family):
        prepare_denoiser(denoiser, family, config, torch.device("cpu"), ((1, 8, 8),))
        for block in (block for block in denoiser.modules() if swapping.MODULATION in vars(block)):
            offloaded, own = vars(block)[swapping.MODULATION], modulation_layers(block, family.modulation)
            vec = torch.randn(3, own[0].in_features, dtype=torch.bfloat16)
            apart = torch.cat([layer.whole_product(torch.nn.functional.silu(vec)) for layer in own], dim=-1)
            fetched.clear()
            joint = offloaded.products(block, vec)
            assert fetched == [block] and joint.dtype == apart.dtype
            assert (joint - apart).norm() < 0.01 * apart.norm()


@pytest.mark.parametrize("base", [{}, {"fp8_base": True, "mixed_precision": "bf16"}])
@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_are_read_into_host_memory(demo, script, base):
    """Where a GPU reads the file, they never take its memory."""
    config, family, denoiser = prepared(demo, script, offload_modulation=True, **base)
    place = plan_placement(family, config, torch.device("cuda"))
    assert place is not None
    placement = place(denoiser)
    offloaded = {id(layer) for block in denoiser.modules() for layer in modulation_layers(block, family.modulation)}
    names = {f"{path}.weight" for path, module in denoiser.named_modules() if id(module) in offloaded}
    assert names and set(placement.host) == names
