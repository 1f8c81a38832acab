"""What is kept for the backward pass: less memory, the same gradients, and no promise that cannot be held."""

import threading

import pytest
import torch

from library import families
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.schema import flatten_sections
from library.measuring.candidates import saving_memory
from library.memory.prepare import describe_blocks
from library.recipes import preset_files
from tests.training import ONE_ADAPTER

LORA = ("flux_train_network", "sdxl_train_network")
QUICK = {"compile": True, "compile_fullgraph": True}
# One kind of block is enough to see it, and the others take long.
ONLY = {
    "flux_train_network": {"compile_blocks": "single:all"},
    "sdxl_train_network": {"compile_blocks": "transformer:all"},
}
LEARNS = {"flux_train_network": {"network_args": ONE_ADAPTER}, "sdxl_train_network": {}}
LARGE = (16, 16)
BUDGET = "compile_activation_budget"
SIZES = (LARGE,)  # a graph of any size takes longer to make than one of a single size


def kept(model):
    """Bytes that the forward pass of one step keeps, weights aside."""
    weights = {p.data_ptr() for p in model.components.denoiser.parameters()}
    sizes = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(LARGE)
    loss.backward()
    return sum(sizes.values())


@pytest.fixture(scope="module")
def computed():
    """What tests of this file have computed for a script: without compiling, and compiled with nothing left out."""
    return {}


@pytest.fixture
def plain(model_of, computed):
    """A function: script -> losses and gradients without compiling; bytes kept when compiled with all kept."""

    def find(script):
        if script not in computed:
            expected = model_of(script, SIZES, **LEARNS[script]).gradients(SIZES)
            computed[script] = *expected, compiled_keeps(model_of, script, expected)
        return computed[script]

    return find


def compiled_keeps(model_of, script, expected, **how):
    """Bytes kept when compiled like this, which gives the expected losses and gradients."""
    torch._dynamo.reset()
    model = model_of(script, SIZES, **QUICK, **ONLY[script], **LEARNS[script], **how)
    for actual, value in zip(model.gradients(SIZES), expected, strict=True):
        torch.testing.assert_close(actual, value)
    return kept(model)


@pytest.mark.parametrize("script", LORA)
def test_attention_is_kept_at_a_small_price_and_gradients_stay(model_of, plain, script):
    *expected, everything = plain(script)
    how = {"gradient_checkpointing": True}
    keeps = how | {"checkpoint_keep_attention": True}
    torch.testing.assert_close(model_of(script, SIZES, **LEARNS[script], **keeps).gradients(SIZES)[1], expected[1])
    attention = compiled_keeps(model_of, script, expected, **keeps)
    assert attention < everything
    if script == "flux_train_network":  # what nothing but the inputs takes is the same elsewhere, and takes long
        assert compiled_keeps(model_of, script, expected, **how) < attention


def test_a_budget_keeps_its_share_and_gradients_stay(model_of, plain):
    """PyTorch divides a graph, of whichever family."""
    script = "flux_train_network"
    *expected, everything = plain(script)  # which is a budget of 1
    half, nothing = (
        compiled_keeps(model_of, script, expected, compile_activation_budget=share) for share in (0.5, 0.0)
    )
    assert nothing < half < everything


@pytest.mark.parametrize("script", LORA)
def test_a_budget_replaces_the_checkpoints_of_compiled_blocks(model_of, plain, script):
    """Eager blocks keep their inputs alone, so that a training fits before it compiles and where it cannot."""
    *expected, everything = plain(script)
    how = {"gradient_checkpointing": True, "compile_activation_budget": 0.5}
    model = model_of(script, SIZES, **ONLY[script], **LEARNS[script], **how, compile=True)
    assert "checkpointed until compiled" in describe_blocks(model.components.denoiser, model.family.block_classes)
    with torch.compiler.set_stance("force_eager"):
        before = kept(model)
    half = compiled_keeps(model_of, script, expected, **how)
    assert before < 0.7 * half and half < everything


def test_every_thread_compiles_with_the_same_settings(model_of):
    """A value that is set holds in its own thread only since torch 2.12; backward passes run in others."""
    import torch._functorch.config as functorch
    from torch.fx.experimental import _config as shapes

    settings = []

    def backend(graph, inputs):
        settings.append((functorch.activation_memory_budget, shapes.use_duck_shape))
        return graph.forward

    options = {"compile": True, "compile_activation_budget": 0.25, "compile_blocks": "double:all"}
    model = model_of("flux_train_network", ((8, 8),), **options)
    for block in model.components.denoiser.double_blocks:
        block.compile(backend=backend)

    def elsewhere():
        assert functorch.activation_memory_budget == 1.0  # PyTorch's own, in a thread that knows nothing yet
        model.loss((8, 8))

    failed = []
    threading.excepthook, before = lambda told: failed.append(told.exc_value), threading.excepthook
    try:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    assert not failed and settings and set(settings) == {(0.25, False)}


@pytest.mark.parametrize("script", LORA)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"network_dropout": 0.1}, "dropout"),
        ({"network_args": ("rank_dropout=0.1",)}, "dropout"),
        ({"gradient_checkpointing": True, "compile_scope": "inner"}, "compile_scope"),
        ({"gradient_checkpointing": True, "blocks_to_swap": 2}, "blocks_to_swap"),
        ({"cpu_offload_checkpointing": True}, "cpu_offload_checkpointing"),
        ({"compile_backend": "eager"}, "compile_backend"),
    ],
)
def test_a_budget_that_cannot_hold_is_refused(script, values, words):
    with pytest.raises(ConfigError, match=f"compile_activation_budget .*{words}") as refused:
        build_config(families.config_class(script), {"compile": True, "compile_activation_budget": 0.5} | values)
    assert len(str(refused.value).splitlines()) == 1


def test_what_has_no_effect_is_reported():
    notes = []
    build_config(
        families.config_class("flux_train"),
        {"compile_activation_budget": 0.5, "checkpoint_keep_attention": True},
        notes=notes,
    )
    assert [str(note).split()[0] for note in notes] == ["checkpoint_keep_attention", "compile_activation_budget"]


WITH_BUDGETS = [preset for preset in preset_files.all_presets() if BUDGET in preset.path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("preset", WITH_BUDGETS, ids=lambda preset: preset.id)
def test_a_preset_with_a_budget_fits_before_it_compiles_and_knows_what_saves_more(preset):
    values = flatten_sections(read_toml(preset.path))
    config = build_config(families.config_class(families.lora_script(preset.family)), values, notes=[])
    assert config.memory.gradient_checkpointing, "or eager steps would keep everything"
    first, *others = saving_memory(config)
    assert first == {BUDGET: 0.0}
    if not config.compile.records_graphs:  # which would need weights that stay
        assert {"blocks_to_swap": 8, BUDGET: 1.0} in others
