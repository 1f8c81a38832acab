"""Recomputed activations, also with inputs that wait on the host: the same losses, eager and compiled."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from library.memory import checkpointing
from library.memory.host_inputs import HostInputs
from tests import training

OFFLOAD = {"cpu_offload_checkpointing": True}


@pytest.fixture(scope="module")
def run(demo, shapes, tmp_path_factory):
    """A function that trains; what was trained before with the same values, mostly plainly, is not done again."""
    losses = {}

    def start(script, **values):
        key = script, repr(sorted(values.items()))
        if key not in losses:
            options = {"resolution": "96", "max_train_steps": 4, "output_dir": tmp_path_factory.mktemp("run")} | values
            losses[key] = training.train(training.config_of(demo, script, train_data_dir=shapes, **options))
        return losses[key]

    return start


@pytest.mark.parametrize("script", training.SCRIPTS)
def test_losses_and_weights_are_the_same(run, script):
    chance = {"max_train_steps": 2} | ({"network_dropout": 0.2} if script in training.LORAS else {})
    plain = run(script, **chance)
    # Where inputs wait on the host they are recomputed as well, by the same code for all families; so do some weights.
    inputs_stay, all_wait = {"gradient_checkpointing": True}, OFFLOAD | {"blocks_to_swap": 2}
    for way in (inputs_stay, all_wait) if script.startswith(("sdxl", "flux_train")) else (all_wait,):
        other = run(script, **chance, **way)
        assert other.losses == plain.losses
        assert other.numbers("grad_norm") == plain.numbers("grad_norm")
        tensors = other.tensors()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in plain.tensors().items())


@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train"])
def test_compiled_blocks_have_them_too(run, script):
    """Backward passes that are traced have them in `compile/test_pairs.py`."""
    # Of the seven graphs of residual blocks of SDXL, which differ in channels alone, one; of FLUX.1 the quicker kind.
    blocks = {"compile_blocks": "transformer:all,resnet:0" if script.startswith("sdxl") else "single:all"}
    plain, compiled = run(script), run(script, **OFFLOAD, compile=True, compile_backend="eager", **blocks)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0, told
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)


WITH_TEXT = {"cache_text_encoder_outputs": False}


@pytest.mark.parametrize(
    ("script", "values", "learning"),
    [
        ("sdxl_train_network", {"network_train_unet_only": False}, {"clip_l", "clip_g"}),
        (
            "flux_train_network",
            {"network_train_unet_only": False, "network_args": ["train_t5xxl=True"]},
            {"clip_l", "t5xxl"},
        ),
        ("sdxl_train", {"train_text_encoder": True, "learning_rate_te1": 0}, {"clip_g"}),
    ],
)
def test_text_encoders_that_learn_recompute_too(run, monkeypatch, script, values, learning):
    from library.train import loop

    calls = {}
    prepare = loop.prepare_encoders

    def noted(encoders, learns, config):
        prepare(encoders, learns, config)
        for name, encoder in encoders.items():
            calls[name] = any(getattr(m, "gradient_checkpointing", False) for m in encoder.modules())

    plain = run(script, **WITH_TEXT, **values, max_train_steps=2)
    monkeypatch.setattr(loop, "prepare_encoders", noted)
    other = run(script, **WITH_TEXT, **values, max_train_steps=2, gradient_checkpointing=True)
    assert {name for name, on in calls.items() if on} == learning
    assert other.losses == plain.losses
    tensors = other.tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in plain.tensors().items())


def test_what_flows_from_block_to_block_is_offloaded_once_a_block(run, monkeypatch):
    offloaded = []
    offload = HostInputs._offload
    monkeypatch.setattr(
        HostInputs, "_offload", lambda host, x, ready: (offloaded.append(x.shape), offload(host, x, ready))[1]
    )
    run("flux_train_network", **OFFLOAD, max_train_steps=1)
    tiny = {"DoubleStreamBlock": 2, "SingleStreamBlock": 4}
    # Image and text, then both as one; what enters the first block is in no graph of gradients, and stays.
    assert len(offloaded) == 2 * (tiny["DoubleStreamBlock"] - 1) + tiny["SingleStreamBlock"]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(x).relu()


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_inputs_leave_the_device_behind_a_block_and_return_one_ahead(backend, monkeypatch):
    """How many are there at a time, and each of them moves once in each direction."""
    inputs, offloaded, before, after, returned = [], [], [], [], []
    offload, restore, fetch = HostInputs._offload, HostInputs._restore, HostInputs._fetch

    def offloading(host, x, ready):
        inputs.append(StorageWeakRef(x.untyped_storage()))
        offloaded.append(offload(host, x, ready))
        before.append(sum(not storage.expired() for storage in inputs))
        return offloaded[-1]

    def restoring(host, call, number):
        tensor = restore(host, call, number)
        after.append(1 + sum(saved.device is not None for saved in offloaded))
        return tensor

    def fetching(host, one):
        returned.extend([one] * (one.device is None))
        fetch(host, one)

    def gradients(*where):
        torch.manual_seed(0)
        blocks = [Block() for _ in range(8)]
        checkpointing.checkpoint_blocks([blocks], *where)
        for block in blocks if backend else ():
            block.compile(backend=backend)
        x = start = torch.randn(4, 16, requires_grad=True)
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        return [start.grad, *(p.grad for block in blocks for p in block.parameters())]

    expected = gradients()
    for name, noted in (("_offload", offloading), ("_restore", restoring), ("_fetch", fetching)):
        monkeypatch.setattr(HostInputs, name, noted)
    assert all(map(torch.equal, gradients(torch.device("cpu")), expected))
    assert before == [1, 2] + [3] * 6, "the first, which this test holds, that of the block, and that of the one before"
    assert after == [2] * 7 + [1], "that of the block, and that of the next one"
    assert returned == offloaded[-2::-1], "all but the last, which has not left yet"
