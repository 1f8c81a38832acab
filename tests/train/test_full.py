"""Full fine-tunes: what learns and what does not, early steps, and half precision, in whole trainings."""

import weakref

import pytest
import torch
from safetensors.torch import load_file

from library.optim.fused_step import PartitionedOptimizer
from tests import training
from tests.training import short_captions  # noqa: F401

ADAFACTOR = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False", "scale_parameter=False"]}
HALF = {"full_bf16": True, "mixed_precision": "bf16"}
FULL = [script for script in training.SCRIPTS if script not in training.LORAS]
TE1, TE2 = "conditioner.embedders.0.transformer.text_model.", "conditioner.embedders.1.model."
UNET = "model.diffusion_model."


@pytest.fixture
def full(demo, squares, tmp_path):
    """Train one of the full scripts for 2 steps, each time into another folder."""

    def run(script="sdxl_train", **values):
        number = len(list(tmp_path.iterdir()))
        options = {"train_data_dir": squares, "output_dir": tmp_path / str(number), "max_train_steps": 2, **values}
        return training.train(training.config_of(demo, script, **options))

    return run


def same(first, other):
    a, b = first.tensors(), other.tensors()
    assert a.keys() == b.keys()
    return first.losses == other.losses and all(torch.equal(a[name], b[name]) for name in a)


# ---- what learns


def moved(demo, outcome):
    """Names of the tensors that differ from the model the training started from."""
    path = training.config_of(demo, "sdxl_train").model.pretrained_model_name_or_path
    before, after = load_file(path), outcome.tensors()
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name].float(), after[name].float())}
    return changed, set(after)


LEARN = {"optimizer_args": ["weight_decay=0"], "cache_text_encoder_outputs": False}
LAST = 1  # the last layer of the tiny encoders


def of(names, *starts):
    return {name for name in names if name.startswith(starts)}


def unread(names):
    """What SDXL does not read of its first encoder: its last layer, and the norm after it."""
    return of(names, f"{TE1}encoder.layers.{LAST}.", f"{TE1}final_layer_norm.")


def rows(*indices):
    return ",".join("0.001" if i in indices else "0" for i in range(23))


def block(names, *places):
    return of(names, *(f"{UNET}{place}" for place in places))


CASES = {
    "the U-Net alone": ({}, lambda names: of(names, UNET)),
    "the U-Net and both encoders": (
        {"train_text_encoder": True},
        lambda names: of(names, UNET, TE1, TE2) - unread(names) - of(names, f"{TE2}logit_scale"),
    ),
    "the second encoder alone": (
        {"train_text_encoder": True, "learning_rate": 0, "learning_rate_te1": 0, "learning_rate_te2": 1e-3},
        lambda names: of(names, TE2) - of(names, f"{TE2}logit_scale"),
    ),
    "the first encoder alone, learning_rate 0": (
        {"train_text_encoder": True, "learning_rate": 0, "learning_rate_te1": 1e-3},
        lambda names: of(names, TE1) - unread(names),
    ),
    "chosen blocks": (
        {"block_lr": rows(0, 5, 11, 13, 22)},
        lambda names: block(
            names, "time_embed.", "label_emb.", "input_blocks.4.", "middle_block.1.", "output_blocks.0.", "out."
        ),
    ),
    "chosen blocks and an encoder": (
        {"block_lr": rows(1, 10), "train_text_encoder": True, "learning_rate_te1": 0},
        lambda names: (
            block(names, "input_blocks.0.", "middle_block.0.") | of(names, TE2) - of(names, f"{TE2}logit_scale")
        ),
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_what_shall_learn_changes(demo, full, case):
    values, expected = CASES[case]
    changed, names = moved(demo, full(**LEARN, **values, max_train_steps=1))
    assert changed == expected(names)


def test_encoders_learn_at_rates_of_their_own(demo, full):
    rates = {"learning_rate": 1e-3, "learning_rate_te1": 1e-4, "learning_rate_te2": 1e-5}
    done = full(**LEARN, train_text_encoder=True, **rates, max_train_steps=1)
    assert done.events("step")[0]["lr"] == {"unet": 1e-3, "text_encoder1": 1e-4, "text_encoder2": 1e-5}
    path = training.config_of(demo, "sdxl_train").model.pretrained_model_name_or_path
    before, after = load_file(path), done.tensors()
    for start, rate in ((UNET, 1e-3), (TE1, 1e-4), (TE2, 1e-5)):  # the first step of Adam moves by the rate
        most = max((after[n] - before[n].float()).abs().max().item() for n in of(after, start))
        assert most == pytest.approx(rate, rel=0.01)


# ---- early steps


@pytest.mark.parametrize("script", training.FULL_OF_EACH_KIND)
def test_early_steps_change_no_number(full, script):
    """Without clipping, which is per tensor there, every way of stepping gives the same file bit for bit."""
    unclipped = {"script": script, "max_grad_norm": 0}
    assert same(full(**unclipped, **ADAFACTOR), full(**unclipped, **ADAFACTOR, fused_backward_pass=True))
    plain = full(**unclipped)
    assert same(plain, full(**unclipped, fused_optimizer_groups=4))
    if script == "flux_train":
        assert same(plain, full(**unclipped, blockwise_fused_optimizers=True))


@training.several_blocks
def test_blocks_are_bundles(full, monkeypatch):
    bundles = []
    begin = PartitionedOptimizer.step_early
    monkeypatch.setattr(
        PartitionedOptimizer, "step_early", lambda self, *args: (bundles.append(self), begin(self, *args))
    )
    full("flux_train", blockwise_fused_optimizers=True, max_train_steps=1)
    (bundle,) = bundles
    assert len(bundle.bundles) == 1 + 2 + 4  # what is outside of blocks, double blocks, single blocks


@training.several_blocks
def test_gradients_live_one_at_a_time(full, monkeypatch):
    """Counted over a whole training: bytes of gradients that exist at once, wherever they are held."""
    alive, peaks, sizes = [], [], []
    begin = PartitionedOptimizer.step_early

    def note(p):
        alive.append((weakref.ref(p.grad), p.grad.nbytes))
        alive[:] = [(gradient, size) for gradient, size in alive if gradient() is not None]
        peaks.append(sum(size for _, size in alive))

    def step_early(self, *args):
        weights = [p for group in self.param_groups for p in group["params"]]
        sizes.extend(p.nbytes for p in weights)
        for p in weights:
            p.register_post_accumulate_grad_hook(note)
        begin(self, *args)

    monkeypatch.setattr(PartitionedOptimizer, "step_early", step_early)
    full(**ADAFACTOR, fused_backward_pass=True, gradient_checkpointing=True)
    assert len(peaks) == 2 * len(sizes)
    # A layer's weight and bias come from one operation, so the one waits for the other.
    assert max(peaks) <= max(sizes) + 4 * 1024
    assert max(peaks) < sum(sizes) / 10


# Backward passes are traced of the kind of block that is quickest; of SDXL, a ResNet block on its way up.
@pytest.mark.parametrize(
    ("script", "blocks"),
    [("flux_train", "double:all=eager,single:all=aot_eager"), ("sdxl_train", "resnet:5,transformer:0")],
)
def test_early_steps_compile(full, script, blocks):
    values = {"script": script, "gradient_checkpointing": True}
    values |= {**ADAFACTOR, **HALF, "fused_backward_pass": True}
    eager = full(**values)
    compiled = full(**values, compile=True, compile_backend="eager", compile_blocks=blocks)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0, told
    assert compiled.losses == pytest.approx(eager.losses, rel=2e-2)


# ---- half precision


@pytest.mark.parametrize("script", FULL)
def test_half_weights_train_like_float32_ones(full, script):
    wide = full(script, mixed_precision="bf16")
    half = full(script, **HALF, save_precision=None)
    assert half.losses == pytest.approx(wide.losses, rel=5e-2)
    assert {t.dtype for n, t in half.tensors().items() if not n.endswith("logit_scale")} == {torch.bfloat16}


def test_small_rates_are_not_lost(full, demo):
    """At a rate that the nearest bfloat16 would swallow, as many weights move as chance allows."""
    rate = {"learning_rate": 1e-6, "optimizer_args": ["weight_decay=0"], "save_precision": None}
    changed, names = moved(demo, full(**HALF, **rate, max_train_steps=1))
    assert len(changed & of(names, UNET)) > 0.9 * len(of(names, UNET))


def test_dreambooth_trains_the_text_encoder_up_to_its_step(demo, squares, tmp_path):
    values = {"max_train_steps": 3, "stop_text_encoder_training": 1, "save_every_n_steps": 1, "learning_rate": 1e-2}
    values |= {"train_data_dir": squares, "output_dir": tmp_path, "output_name": "m", "mixed_precision": "no"}
    training.train(training.config_of(demo, "train_db", **values))
    first, last = (load_file(tmp_path / name) for name in ("m-step00000001.safetensors", "m.safetensors"))
    start = load_file(training.config_of(demo, "train_db").model.pretrained_model_name_or_path)
    encoder = of(first, "cond_stage_model.")
    assert encoder and all(torch.equal(first[name], last[name]) for name in encoder)
    assert any(not torch.equal(first[name].float(), start[name].float()) for name in encoder)
    assert all(not torch.equal(first[name], last[name]) for name in of(first, UNET) if "transformer_blocks" in name)
