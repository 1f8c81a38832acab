"""Attention that leaves padding out without a mask equals attention with one."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from library import families
from library.bench.prepared_model import open_prepared
from library.bench.subjects import FamilySubject
from library.compiler import attention_kernels
from library.families.shared import attention
from library.families.shared.transformer import grouped_sdpa, sdpa
from library.memory import padded_attention
from library.memory.attention import AttentionRecorder

SIZES = {  # heads, heads of keys, queries, keys; real tokens of each image
    "one length": (4, 4, 24, 24, (20, 20)),
    "unequal lengths": (4, 4, 24, 24, (24, 7)),
    "no padding": (2, 2, 9, 9, (9, 9)),
    "grouped heads": (6, 2, 24, 24, (17, 24)),
    "fewer queries than keys": (4, 4, 8, 24, (9, 24)),
    "mostly padding": (2, 1, 12, 96, (24, 16)),
    "nothing real in one": (4, 4, 24, 24, (24, 0)),
}
WIDTH = 16


@pytest.fixture
def without_masks():
    attention.replace_masks(padded_attention.attention_by("cpu"))
    yield
    attention.replace_masks(None)


def inputs(size, offset=0.0):
    """q, k, v and which keys are real, at random places; all scores are lower by about `offset`."""
    heads, groups, queries, keys, real = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, queries, WIDTH, generator=generator)
    k, v = torch.randn(2, 2, groups, keys, WIDTH, generator=generator)
    q[..., 0], k[..., 0] = WIDTH**0.5, k[..., 0] - offset
    order = torch.rand(2, keys, generator=generator).argsort(1)
    is_real = order < torch.tensor(real)[:, None]
    # What padding holds must not matter.
    k, v = (torch.where(is_real[:, None, :, None], x, 50.0) for x in (k, v))
    return [x.requires_grad_() for x in (q, k, v)], is_real


def results(attend, tensors, is_real):
    output = attend(*tensors, is_real)
    return [output, *torch.autograd.grad((output * output).sum(), tensors)]


def masked(q, k, v, is_real):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_real[:, None, None]).transpose(1, 2).flatten(2)


def assert_equal(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1)


@pytest.mark.usefixtures("without_masks")
@pytest.mark.parametrize("offset", [0.0, 40.0, -40.0])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients_are_those_of_a_mask(size, offset, monkeypatch):
    tensors, is_real = inputs(size, offset)
    expected = results(masked, tensors, is_real)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)  # the mask's kernel
    assert_equal(results(grouped_sdpa if size == "grouped heads" else sdpa, tensors, is_real), expected)


@pytest.mark.usefixtures("without_masks")
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_blocks_agree_and_checkpoints_that_keep_attention_do_not_repeat_it(backend, monkeypatch):
    tensors, is_real = inputs("unequal lengths")
    expected, calls = results(masked, tensors, is_real), []
    kernel = attention_kernels.unmasked_attention
    monkeypatch.setattr(attention_kernels, "unmasked_attention", lambda *given: calls.append(1) or kernel(*given))
    from library.memory.checkpointing import _keeping_attention

    def kept(*tensors):
        return checkpoint(sdpa, *tensors, use_reentrant=False, context_fn=_keeping_attention)

    assert_equal(results(torch.compile(sdpa, backend=backend, fullgraph=True), tensors, is_real), expected)
    calls.clear()
    assert_equal(results(kept, tensors, is_real), expected)
    assert len(calls) == 1


@pytest.mark.usefixtures("without_masks")
def test_heads_that_the_kernel_does_not_support_keep_the_mask():
    tensors = [torch.randn(1, 2, 6, 12) for _ in range(3)]
    is_real = torch.tensor([[True] * 4 + [False] * 2])
    assert attention.attend_padded(*tensors, is_real) is None
    assert torch.equal(sdpa(*tensors, is_real), masked(*tensors, is_real))


@pytest.mark.usefixtures("without_masks")
def test_the_kernels_that_could_replace_it_are_recorded():
    tensors, is_real = inputs("grouped heads")
    with AttentionRecorder(torch.device("cpu")) as watch:
        grouped_sdpa(*tensors, is_real)
    assert watch.able == {"flash", "math"}


# Families whose networks mask padding, and by which option.
MASKED = {"anima": {}, "flux": {"apply_t5_attn_mask": True}, "flux_3": {}, "krea_2": {}, "zimage": {}}
MASKED |= {"qwen_image": {}, "qwen_image_21": {}}


@pytest.mark.parametrize("family", [facts.name for facts in families.all_families()])
def test_every_family_learns_as_with_masks(family, monkeypatch):
    """Losses of three steps, of which later ones depend on gradients, with captions of unequal lengths."""
    text, used = FamilySubject.text, []
    values = {"train_batch_size": 2, "learning_rate": 0.01, **MASKED.get(family, {})}

    def with_padding(subject, trainable, device):
        found = text(subject, trainable, device)
        for name in found.keys() & {trainable.family.text_cache.mask, "t5_attn_mask"}:
            length = found[name].shape[1]
            found[name] = (torch.arange(length) < torch.tensor([[length], [length // 3]])).long()
        return found

    def losses(kernel):
        torch.manual_seed(0)
        subject = FamilySubject(families.lora_script(family), values, "tiny")
        with open_prepared(subject, subject.config({}), torch.device("cpu"), 64) as ready:
            attention.replace_masks(kernel)
            return torch.stack([ready.step() for _ in range(3)])

    def watched(*tensors):
        output = padded_attention.attention_by("cpu")(*tensors)
        used.append(output is not None)
        return output

    monkeypatch.setattr(FamilySubject, "text", with_padding)
    try:
        expected, found = losses(None), losses(watched)
    finally:
        attention.replace_masks(None)
    assert (family in MASKED) == any(used), f"{family} masks padding if, and only if, MASKED in this file has it"
    assert all(used)
    assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("offset", [0.0, 20.0])
@pytest.mark.parametrize("shape", [(24, 24, 1, 1100), (48, 12, 2, 700)])
def test_kernels_of_a_gpu_are_as_exact_as_with_a_mask(kernel, offset, shape):
    """Distances from float32, of outputs and gradients in bf16, are at most 1.5 times those of a mask."""
    heads, groups, number, length = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads):
        return torch.randn(number, heads, length, 128, device="cuda", generator=generator)

    q, k, v, gradient = draw(heads), draw(groups), draw(groups), draw(heads).transpose(1, 2).flatten(2)
    q[..., 0], k[..., 0] = 128**0.5, k[..., 0] - offset
    is_real = torch.arange(length, device="cuda").expand(number, -1) < length - 61

    def run(attend, dtype):
        tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        output = attend(*tensors, is_real)
        return [x.float() for x in (output, *torch.autograd.grad(output, tensors, gradient.to(output.dtype)))]

    exact = run(masked, torch.float32)
    with_mask = run(masked, torch.bfloat16)
    attention.replace_masks(padded_attention.attention_by(kernel))
    try:
        found = run(grouped_sdpa, torch.bfloat16)
    finally:
        attention.replace_masks(None)
    for one, usual, expected in zip(found, with_mask, exact, strict=True):
        assert (one - expected).norm() <= 1.5 * (usual - expected).norm() + 1e-6 * expected.norm()
