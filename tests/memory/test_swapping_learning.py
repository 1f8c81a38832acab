"""Blocks that learn and wait in host memory: the same gradients, the same weights, and the memory that it is for.

On a CPU the slots are copies as they are on a GPU; only streams are not exercised.
"""

import contextlib
import copy
import dataclasses
import weakref

import pytest
import torch

from library import families, methods
from library.config.problems import ConfigError
from library.memory import swapping
from library.memory.prepare import prepare_denoiser
from tests import training
from tests.training import problems_and_remarks

HALF = {"full_bf16": True, "mixed_precision": "bf16"}
ADAFACTOR = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False", "scale_parameter=False"]}
FUSED = {**ADAFACTOR, "fused_backward_pass": True}
CPU = torch.device("cpu")
# The most that can be swapped of the tiny models.
BLOCKS = {
    "flux_train": 4,
    "sdxl_train": 6,
    "qwen_image_train": 3,
    "zimage_train": 3,
    "flux_2_train": 4,
    "anima_train": 3,
}
# Of the graphs of residual blocks, which differ in channels alone, those of the first and, of the model that learns, of
# the last. Backward passes are
# traced of all kinds where their own weights learn, and where adapters do of one; those of the families that are not
# here, in compile/test_captions_of_any_length.py.
COMPILED_BLOCKS = {
    "sdxl_train": "transformer:all,resnet:0,11",
    "sdxl_train_network": "transformer:all,resnet:0",
    "flux_train_network": "double:all=eager,single:all",
}
READ = {}  # the networks of a script, of which models have copies, and what its text encoders say about one caption


def grad_of(p):
    """Of weights whose answer nothing reads, eager code has none and compiled code zeros."""
    return torch.zeros_like(p) if p.grad is None else p.grad


class Model:
    """A denoiser that learns, prepared as in a training."""

    def __init__(self, demo, script, sizes=((8, 8), (8, 16)), **values):
        self.sizes = sizes  # of latents
        self.config = training.config_of(demo, script, gradient_checkpointing=True, **values)
        self.family = families.family_for(self.config)
        if script not in READ:
            parts = self.family.load(torch.float32)
            with torch.no_grad():
                READ[script] = parts, self.family.text(parts, ["a red circle"])
        parts, self.text = READ[script]
        self.parts = dataclasses.replace(parts, denoiser=copy.deepcopy(parts.denoiser))
        self.method = methods.attach_method(self.parts, self.family, self.config)
        self.denoiser = self.parts.denoiser
        prepare_denoiser(self.denoiser, self.family, self.config, CPU, sizes)
        self.swap = swapping.find_trainable_swap(self.denoiser)
        self.denoiser.train()

    def backward(self, seed=0, sizes=None):
        """Gradients of one batch for each size of latents, added up."""
        chance = torch.Generator().manual_seed(seed)
        for size in sizes or self.sizes:
            channels = {"sdxl": 4, "flux_2": 32}.get(self.family.name, 16)
            noised = self.family.noised(torch.randn(1, channels, *size, generator=chance), chance)
            answer = self.family.predict(self.denoiser, noised, self.text, torch.ones(1, 6))
            (answer - noised.target).square().mean().backward()
        if self.swap:
            self.swap.sync_to_host()

    def gradients(self):
        return {name: grad_of(p) for name, p in self.denoiser.named_parameters()}


@pytest.fixture(scope="module")
def expected(demo):
    """Gradients without swapping, eager."""
    found = {}
    for script in BLOCKS:
        model = Model(demo, script)
        assert model.swap is None
        model.backward()
        found[script] = model.gradients()
    return found


@pytest.mark.parametrize("script", BLOCKS)
def test_gradients_are_the_same_for_every_number_of_blocks(demo, expected, script):
    for number in range(1, BLOCKS[script] + 1):
        model = Model(demo, script, blocks_to_swap=number)
        model.backward()
        gradients = model.gradients()
        assert gradients.keys() == expected[script].keys()
        assert all(torch.equal(gradients[name], expected[script][name]) for name in gradients), number
    blocks = model.family.swap_plan(BLOCKS[script])
    assert len(model.swap.blocks) == sum(blocks.values()), "all of them, in the end"


@pytest.mark.parametrize("script", [*BLOCKS, *(name for name in training.LORAS if name in COMPILED_BLOCKS)])
def test_compiled_gradients_are_the_same_for_few_blocks_some_and_all(demo, script):
    """Weights that learn and those that do not; one set of graphs serves all numbers. Eagerly each of them is tried.

    Several numbers where only some blocks are compiled. Frozen blocks of the others are swapped and compiled in
    `test_integers.py`, in whole trainings.
    """
    chance, start = torch.Generator().manual_seed(0), []
    learns = {"network_args": training.ONE_ADAPTER} if script == "flux_train_network" else {}

    def gradients(**values):
        # Graphs of any size take several times as long.
        model = Model(demo, script, sizes=((8, 8),), **learns, **values)
        for number, p in enumerate(model.method.parameters()):
            if number == len(start):  # adapters begin with zeros, and would hide what gradients are worth
                start.append(torch.randn(p.shape, generator=chance) * 0.02 if model.config.adapters else p.data.clone())
            p.data.copy_(start[number])
        model.backward(sizes=((8, 8), (8, 8)))
        return [grad_of(p) for p in model.method.parameters()], model.denoiser.__dict__.get("_swap")

    wanted, most = gradients()[0], max(BLOCKS[name] for name in BLOCKS if script.startswith(name))
    few = {"compile_blocks": COMPILED_BLOCKS.get(script)}
    several = {1, most // 2} if script in COMPILED_BLOCKS else set()
    backend = "aot_eager" if script in ("sdxl_train", "flux_train", "flux_train_network") else "eager"
    for number in sorted({*several, most}):
        actual, swap = gradients(blocks_to_swap=number, compile=True, compile_backend=backend, **few)
        for gradient, same in zip(actual, wanted, strict=True):
            torch.testing.assert_close(gradient, same, msg=f"{number} swapped")
    assert len(swap.blocks) == (6 if script.startswith("flux") else most), "all of them, in the end"


def test_a_second_step_reads_what_the_first_has_written(demo):
    """The optimizer steps on the host, so what is in the slots has grown old."""

    def losses(**values):
        model = Model(demo, "flux_train", **values)
        optimizer = torch.optim.SGD(model.method.parameters(), lr=0.1)
        for seed in range(3):
            model.backward(seed)
            optimizer.step()
            optimizer.zero_grad()
        return model.method.snapshot()

    first, other = losses(), losses(blocks_to_swap=3)
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_weights_are_computed_with_on_the_device_and_kept_on_the_host(demo):
    model = Model(demo, "flux_train", blocks_to_swap=4)
    slots = [slot.memory for slot in model.swap._slots.slots]
    assert len(slots) == swapping.SLOTS, "for double and for single blocks alike"
    assert {memory.nbytes for memory in slots} == {max(packed.host.nbytes for packed in model.swap.blocks)}

    def within(p, memories):
        return any(m.data_ptr() <= p.data_ptr() < m.data_ptr() + m.nbytes for m in memories)

    devices = []
    for packed in model.swap.blocks:
        for module in packed.block.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda m, _: devices.append(within(m.weight, slots)))
    model.backward()
    assert len(devices) == 2 * 2 * (2 * 10 + 4 * 3), "two batches, forward and recomputed, every layer of every block"
    assert all(devices)
    hosts = [packed.host for packed in model.swap.blocks]
    assert all(within(p, hosts) for packed in model.swap.blocks for p, _, _ in packed.parts)
    matrices = [p for p in model.denoiser.parameters() if p.dim() >= 2]
    resident = [p for p in matrices if not within(p, hosts)]
    assert sum(p.nbytes for p in matrices) - sum(p.nbytes for p in resident) > 0.9 * sum(h.nbytes for h in hosts)


@pytest.mark.parametrize("script", BLOCKS)
def test_each_block_is_fetched_once_forward_and_once_backward(demo, script, monkeypatch):
    """The U-Net lists its blocks in another order than it calls them in."""
    model = Model(demo, script, blocks_to_swap=BLOCKS[script])
    model.backward(sizes=((8, 8),))
    filled = []
    fill = swapping._Slots.fill
    monkeypatch.setattr(swapping._Slots, "fill", lambda slots, packed: (filled.append(packed), fill(slots, packed))[1])
    model.backward(sizes=((8, 8),))
    assert len(filled) == 2 * len(model.swap.blocks) - swapping.SLOTS, "the last of the forward pass are still there"
    assert {packed.block for packed in filled} == {packed.block for packed in model.swap.blocks}


class Stream:
    """A GPU's queue, as far as it is known which copies it waits for."""

    def __init__(self):
        self.copies = []

    def wait_event(self, copies):
        self.copies += [copy for copy in copies if copy not in self.copies]

    def wait_stream(self, other):
        self.wait_event(other.copies)

    def record_event(self):
        return list(self.copies)


@pytest.mark.parametrize("way", ["stepped on the host", "stepped on the device"])
@pytest.mark.parametrize("script", BLOCKS)
def test_copies_and_gradients_overlap(demo, script, way, monkeypatch):
    """No block waits for the weights of the next, or for its own on their way to the host; nothing is overwritten.

    Blocks of two streams answer twice, so that their gradients begin twice.
    """
    early = way == "stepped on the device"
    model = Model(demo, script, blocks_to_swap=BLOCKS[script], **(FUSED if early else {}))
    model.backward(sizes=((8, 8),))
    compute, copying, leaving, needed = Stream(), Stream(), Stream(), []
    fill, flush, use = swapping._Slots.fill, swapping._Slot.flush, swapping.Swap.use

    def filled(slots, packed):
        if owner := slots.next.owner:
            written = [copy for copy in leaving.copies if copy[:2] == ("written", owner.block)]
            assert not owner.changes and all(copy in copying.copies for copy in written)
        copying.copies.append(("filled", packed.block, len(copying.copies)))
        return fill(slots, packed)

    def flushed(slot):
        if slot.owner and slot.owner.changes:
            leaving.copies.append(("written", slot.owner.block, len(leaving.copies)))
        flush(slot)

    def used(swap, index, forward):
        use(swap, index, forward)
        block = swap.blocks[index].block
        needed.extend(copy for copy in copying.copies if copy[:2] == ("filled", block))
        assert {copy for copy in compute.copies if copy[0] == "filled"} == set(needed)

    monkeypatch.setattr(swapping._Slots, "fill", filled)
    monkeypatch.setattr(swapping._Slot, "flush", flushed)
    monkeypatch.setattr(swapping.Swap, "use", used)
    monkeypatch.setattr(model.swap, "stream", copying)
    monkeypatch.setattr(model.swap, "leaving", leaving)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    model.backward(sizes=((8, 8),))
    number, slots = len(model.swap.blocks), len(model.swap._slots.slots)
    assert slots == swapping.SLOTS + (swapping.LEAVING if early else 0)
    again = slots if early else 0  # the first blocks are still there from the step before
    assert sum(copy[0] == "filled" for copy in copying.copies) == 2 * number - slots - again
    assert sum(copy[0] == "written" for copy in leaving.copies) == (number if early else 0)


def test_gradients_of_swapped_blocks_do_not_stay_on_the_device(demo, monkeypatch):
    alive, peaks = [], []
    send = swapping._Packed.offload_gradients

    def note(p):
        alive.append(weakref.ref(p.grad))
        alive[:] = [gradient for gradient in alive if gradient() is not None]
        peaks.append(len(alive))

    def noted(packed):
        for p, _, _ in packed.parts:
            p.register_post_accumulate_grad_hook(note)
        send(packed)

    monkeypatch.setattr(swapping._Packed, "offload_gradients", noted)
    model = Model(demo, "flux_train", blocks_to_swap=4)
    model.backward()
    assert len(peaks) == 2 * sum(len(packed.parts) for packed in model.swap.blocks)
    assert max(peaks) <= 2, "of a layer, which makes those of its weight and bias in one go"


def test_gradients_of_a_broken_step_are_forgotten(demo, expected):
    """As when compiling fails halfway: the step is done again."""
    model = Model(demo, "flux_train", blocks_to_swap=4)
    model.backward(5, sizes=((8, 8),))
    for p in model.denoiser.parameters():
        p.grad = None
    assert not any(packed.gradients for packed in model.swap.blocks)
    (model.denoiser.double_blocks[0].img_mlp[0].weight.sum()).backward()
    assert any(packed.gradients for packed in model.swap.blocks)
    model.swap.forget_gradients()
    model.denoiser.zero_grad()
    model.backward()
    gradients = model.gradients()
    assert all(torch.equal(gradients[name], expected["flux_train"][name]) for name in gradients)


# ---- whole trainings


@pytest.fixture
def full(demo, squares, tmp_path):
    def run(script, **values):
        number = len(list(tmp_path.iterdir()))
        options = {"train_data_dir": squares, "output_dir": tmp_path / str(number), "max_train_steps": 2, **values}
        return training.train(training.config_of(demo, script, gradient_checkpointing=True, **options))

    return run


def same(first, other, ending=""):
    from safetensors.torch import load_file

    a, b = (load_file(outcome.file.with_stem(outcome.file.stem + ending)) for outcome in (first, other))
    assert first.losses == other.losses
    assert first.numbers("grad_norm") == other.numbers("grad_norm")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("flux_train", {"gradient_accumulation_steps": 2}),
        ("flux_train", HALF),
        ("flux_train", {**HALF, **FUSED}),
        ("sdxl_train", {**HALF, **FUSED}),
    ],
    ids=["flux accumulated", "flux half", "flux fused half", "sdxl fused half"],
)
def test_trainings_are_the_same(full, script, values):
    number = 3
    same(full(script, **values), full(script, **values, blocks_to_swap=number))


def test_blockwise_optimizers_step_blocks_while_they_are_there(full):
    values = {"blockwise_fused_optimizers": True, **HALF}
    same(full("flux_train", **values), full("flux_train", **values, blocks_to_swap=4))


def test_averages_samples_and_states_see_the_true_weights(full, tmp_path):
    """Also in the middle of a training, when some blocks are on the device and newer there."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 1 --d 1", encoding="utf-8")
    more = {"sample_prompts": prompts, "sample_every_n_steps": 2, "save_every_n_steps": 2, "save_state": True}
    values = {"max_train_steps": 4, "ema_decay": 0.8, **more}
    alone = values | dict.fromkeys(("sample_prompts", "sample_every_n_steps", "save_every_n_steps"))
    for way in (FUSED, {}):
        plain = full("flux_train", **values if way else alone, **way)
        swapped = full("flux_train", **values, **way, blocks_to_swap=4)
        same(plain, swapped)
        same(plain, swapped, "-ema")
        if way:
            sampled = [sorted((o.file.parent / "sample").glob("*.png")) for o in (plain, swapped)]
            assert len(sampled[0]) == 2
            assert [p.read_bytes() for p in sampled[0]] == [p.read_bytes() for p in sampled[1]]
        state = swapped.file.with_name(f"{swapped.file.stem}-step00000002-state")
        other = {} if way else {"blocks_to_swap": 2}  # without swapping, and with another number of blocks
        resumed = full("flux_train", **alone, **way, **other, resume=state)
        assert resumed.losses == plain.losses[2:]


def test_groups_that_span_blocks_are_refused(demo):
    with pytest.raises(ConfigError, match="fused_backward_pass"):
        training.config_of(demo, "sdxl_train", fused_optimizer_groups=4, blocks_to_swap=3)


def test_several_processes_need_early_steps(demo, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for values, refused in (({}, True), (FUSED, False)):
        config = training.config_of(demo, "flux_train", blocks_to_swap=3, **values)
        assert any("blocks_to_swap" in str(problem) for problem in problems_and_remarks(config)[0]) == refused
