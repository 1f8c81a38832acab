"""Weights on their way from a file to where the steps want them: the same bits by every way, and nothing read twice."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from library import families
from library.families.shared import read_ahead, transfer, weights
from library.memory import placement
from library.memory.quantization import fp8_storage
from tests import training

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool)


def same_bits(first, other):
    return first.dtype == other.dtype and first.shape == other.shape and bits(first).equal(bits(other))


def bits(tensor):
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def stored(tmp_path):
    """A file with tensors of all types and odd sizes, and what is in it."""
    chance = torch.Generator().manual_seed(0)
    tensors = {
        f"{i}.weight": torch.randn((i * 37) % 101 + 1, 7 + i, generator=chance).to(KINDS[i % 6]) for i in range(36)
    }
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(3)}
    save_file(tensors, tmp_path / "stored.safetensors")
    return tmp_path / "stored.safetensors", tensors


@pytest.mark.parametrize("size", [8, 1000, transfer.READ_BYTES])
def test_tensors_arrive_as_they_are_stored_whatever_the_pieces(stored, size):
    path, tensors = stored
    file, arrived = weights.open_weights(path), {}
    transfer.read_ranges(
        {name: file.source(name).range for name in file}, torch.device("cpu"), arrived.__setitem__, size
    )
    assert arrived.keys() == tensors.keys()
    assert all(same_bits(arrived[name], tensor) for name, tensor in tensors.items())
    unmapped = weights.open_weights(path, mmap=False)
    assert all(same_bits(unmapped[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_ends_early_is_named(stored):
    path, _ = stored
    ranges = {name: weights.open_weights(path).source(name).range for name in ("3.weight", "7.weight")}
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(weights.ConfigError, match=r"stored\.safetensors became shorter"):
        transfer.read_ranges(ranges, torch.device("cpu"), lambda *_: None)


def loaded(config, device=None, read=None):
    """The denoiser of a config, by the host or by way of a device; `read` collects the ranges that are read for it."""
    family = families.family_for(config)
    parts = family.load(fp8_storage.storage_type(config), fp8_storage.compute_type(config), deferring=True)
    assert {p.device.type for p in parts.denoiser.parameters()} == {"meta"}
    place = placement.plan_placement(family, config, torch.device("meta")) if device else None
    parts.read_denoiser((lambda denoiser: replace(place(denoiser), device=device)) if place else None)
    return parts.denoiser


WAYS = {
    "plain": {},
    "swapped": {"blocks_to_swap": 2},
    "fp8": {"fp8_base": True},
    "int8": {"int8_base": True},
    "fp8 and swapped": {"fp8_base": True, "blocks_to_swap": 2},
}


@pytest.mark.parametrize("script", training.LORAS)
@pytest.mark.parametrize("way", WAYS)
def test_a_denoiser_has_the_same_bits_by_way_of_the_device(demo, monkeypatch, script, way):
    """Only its own tensors are read, each byte of them once at most; those kept in 8 bits are rounded alike."""
    ranges_read = []
    real = transfer.read_ranges
    monkeypatch.setattr(
        transfer, "read_ranges", lambda ranges, *rest: ranges_read.append(ranges) or real(ranges, *rest)
    )
    config = training.config_of(demo, script, mixed_precision="bf16", **WAYS[way])
    ours, usual = loaded(config, torch.device("cpu")).state_dict(), loaded(config).state_dict()
    assert ours.keys() == usual.keys()
    for name, tensor in ours.items():
        expected = usual[name].to(tensor.dtype)  # which is what storing does with it later, one after the other
        assert same_bits(tensor, expected), name
        assert tensor.dtype == usual[name].dtype or "fp8" in way
    (ranges,) = ranges_read
    assert ranges.keys() <= ours.keys()
    read = sum(one.length for one in ranges.values())
    assert read <= sum(tensor.nbytes * 4 for tensor in ours.values())
    if way == "plain":
        assert ranges.keys() == ours.keys()


@pytest.mark.parametrize("script", training.LORAS)
def test_what_is_rounded_or_swapped_later_waits_on_the_host(demo, script):
    family_config = {
        name: training.config_of(demo, script, mixed_precision="bf16", **way) for name, way in WAYS.items()
    }

    def place(way):
        config = family_config[way]
        family = families.family_for(config)
        parts = family.load(torch.bfloat16, deferring=True)
        names = {name for name, p in parts.denoiser.named_parameters() if p.dim() >= 2}
        plan = placement.plan_placement(family, config, torch.device("meta"))(parts.denoiser)
        assert {*plan.host, *plan.eight_bits} <= names
        return plan

    assert not place("plain").host and not place("plain").eight_bits
    swapped, fp8, both = place("swapped"), place("fp8"), place("fp8 and swapped")
    assert swapped.host and not swapped.eight_bits
    assert fp8.eight_bits and not fp8.host
    assert both.host >= swapped.host and both.eight_bits == fp8.eight_bits
    assert place("int8").host == fp8.eight_bits


def test_a_file_is_read_ahead_where_the_denoiser_is(stored, monkeypatch):
    path, tensors = stored
    touched = []
    monkeypatch.setattr(read_ahead, "_touch", lambda file, offset, memory: touched.append((file, offset, len(memory))))
    for thread in read_ahead.start_reading(path, "1"):
        thread.join()
    ranges = [weights.open_weights(path).source(name).range for name in tensors if name.startswith("1")]
    first, last = min(r.offset for r in ranges), max(r.offset + r.length for r in ranges)
    assert touched == [(path, first, last - first)]
    for broken in (path.parent / "absent.safetensors", path.parent / "empty"):  # is said by who reads it
        for thread in read_ahead.start_reading(broken):
            thread.join()


# ---- on a GPU


@pytest.mark.gpu
def test_all_numbers_are_cast_alike_on_a_gpu():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    wide, also = every.to(torch.bfloat16), torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for tensor, kind in (
        (every, torch.bfloat16),
        (also, torch.float16),
        (wide, torch.float8_e4m3fn),
        (also, torch.float8_e4m3fn),
        (every, torch.float32),
        (also, torch.float32),
    ):
        sound = tensor[~tensor.float().isnan()]
        assert same_bits(sound.cuda().to(kind), sound.to(kind)), kind


@pytest.mark.gpu
@pytest.mark.parametrize("script", training.LORAS)
@pytest.mark.parametrize("way", WAYS)
def test_a_denoiser_has_the_same_bits_on_a_gpu(demo, script, way):
    config = training.config_of(demo, script, mixed_precision="bf16", **WAYS[way])
    ours, usual = loaded(config, torch.device("cuda")), loaded(config).state_dict()
    assert all(same_bits(tensor, usual[name].to(tensor.dtype)) for name, tensor in ours.state_dict().items())
    if way == "plain":
        assert {p.device.type for p in ours.parameters()} == {"cuda"}


@pytest.mark.gpu
def test_adapters_are_drawn_alike_wherever_the_model_is():
    """On the host, from its generator."""
    from library.methods.adapters import AdapterSpec, LoraLinear

    drawn = []
    for device in ("cpu", "cuda"):
        layer = torch.nn.Linear(8, 4, device=device)
        torch.manual_seed(0)
        drawn.append(LoraLinear.around(layer, AdapterSpec(rank=2, alpha=1)).lora_down.weight)
    assert same_bits(*drawn) and drawn[1].device.type == "cuda"


@pytest.mark.gpu
def test_reading_holds_no_second_model_on_a_gpu(tmp_path):
    tensors = {f"{i}.weight": torch.randn(2048, 2048).to(torch.float16) for i in range(16)}
    save_file(tensors, tmp_path / "large.safetensors")
    file, model = weights.open_weights(tmp_path / "large.safetensors"), torch.nn.ModuleList()
    for _ in tensors:
        model.append(torch.nn.Linear(2048, 2048, bias=False, device="meta"))
    from library.families.base import WeightPlacement

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sources = {name: file.source(name) for name in file}
    transfer.fill_weights(model, sources, transfer.widened(torch.bfloat16), WeightPlacement(torch.device("cuda")))
    matrix_bytes = 2048 * 2048 * 2
    assert torch.cuda.max_memory_allocated() - before <= (len(tensors) + 4) * matrix_bytes
    assert all(same_bits(model.get_parameter(name), tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
