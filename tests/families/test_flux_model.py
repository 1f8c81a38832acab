"""Our FLUX denoiser against diffusers' one: same weights, same outputs, same gradients. And its compiled blocks."""

import pytest
import torch

from library.compiler.blocks import compile_model
from library.config.sections import Compile
from library.families.flux.family import FluxFamily as Family
from library.families.flux.model import Flux, Sizes
from library.families.shared import tensor_names
from library.families.shared.transformer import rope, sinusoids
from tests import double_stream


def sizes(**changes):
    options = {
        "in_channels": 64,
        "out_channels": 64,
        "vector_channels": 24,
        "text_channels": 40,
        "hidden": 64,
        "head": 32,
        "mlp": 256,
        "double_blocks": 2,
        "single_blocks": 3,
        "guidance": True,
    }
    return Sizes(**{**options, **changes})


def made(of, seed=0):
    torch.manual_seed(seed)
    model = Flux(of)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


def ids(height, width):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1).float()


def inputs(of, height=4, width=6, length=5, batch=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {
        "img": torch.randn(batch, height * width, of.in_channels, generator=g),
        "img_ids": ids(height, width),
        "txt": torch.randn(batch, length, of.text_channels, generator=g),
        "txt_ids": torch.zeros(length, 3),
        "timesteps": torch.tensor([0.1234, 0.987])[:batch],
        "y": torch.randn(batch, of.vector_channels, generator=g),
        "guidance": torch.tensor([3.5, 1.0])[:batch] if of.guidance else None,
    }


def oracle(model):
    diffusers = pytest.importorskip("diffusers")
    of = model.sizes
    other = diffusers.FluxTransformer2DModel(
        in_channels=of.in_channels,
        num_layers=of.double_blocks,
        num_single_layers=of.single_blocks,
        attention_head_dim=of.head,
        num_attention_heads=of.hidden // of.head,
        joint_attention_dim=of.text_channels,
        pooled_projection_dim=of.vector_channels,
        guidance_embeds=of.guidance,
        axes_dims_rope=of.axes,
    )
    other.load_state_dict(double_stream.flux_to_diffusers(model.state_dict()), strict=True)
    return other


def ask_oracle(other, model_inputs, mask=None):
    return other(
        hidden_states=model_inputs["img"],
        encoder_hidden_states=model_inputs["txt"],
        pooled_projections=model_inputs["y"],
        timestep=model_inputs["timesteps"],
        img_ids=model_inputs["img_ids"],
        txt_ids=model_inputs["txt_ids"],
        guidance=model_inputs["guidance"],
        joint_attention_kwargs=None if mask is None else {"attention_mask": mask[:, None, None, :]},
        return_dict=False,
    )[0]


@pytest.mark.parametrize("guidance", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_outputs_and_gradients_equal_those_of_diffusers(guidance, masked):
    ours = made(sizes(guidance=guidance))
    theirs = oracle(ours)
    mine, other = inputs(ours.sizes), inputs(ours.sizes)
    leaves = ("img", "txt", "y")
    for model_inputs in (mine, other):
        for name in leaves:
            model_inputs[name].requires_grad_()
    text_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]) if masked else None
    joint = ours.joint_mask(text_mask, mine["img"]) if masked else None

    out, expected = ours(**mine, txt_attention_mask=text_mask), ask_oracle(theirs, other, joint)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for name in leaves:
        torch.testing.assert_close(mine[name].grad, other[name].grad, rtol=1e-3, atol=1e-4, msg=name)
    expected_grads = double_stream.flux_to_bfl({name: p.grad for name, p in theirs.named_parameters()})
    grads = {name: p.grad for name, p in ours.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=1e-4, msg=name)


def test_full_size_has_the_tensors_and_values_of_flux_dev():
    full = sizes(vector_channels=768, text_channels=4096, hidden=3072, head=128, mlp=12288)
    full = Sizes(**{**vars(full), "double_blocks": 19, "single_blocks": 38})
    with torch.device("meta"):
        model = Flux(full)
    parameters = list(model.parameters())
    assert len(parameters) == 780
    assert sum(p.numel() for p in parameters) == 11_901_408_320
    assert full.axes == (16, 56, 56)


@pytest.mark.parametrize("guidance", [True, False])
def test_sizes_are_read_from_shapes(guidance):
    of = sizes(guidance=guidance, in_channels=32, out_channels=16, mlp=96)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Flux(of).state_dict().items()}
    assert Sizes.of(shapes) == of


@pytest.mark.parametrize("head", [8, 16, 24, 32, 48, 64, 96, 128])
def test_axes_share_the_head_evenly(head):
    axes = sizes(head=head).axes
    assert sum(axes) == head and all(width % 2 == 0 and width > 0 for width in axes) and axes[1] == axes[2]


def test_a_head_that_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        _ = sizes(head=30).axes


def test_without_guidance_its_embedding_is_left_out():
    model = made(sizes())
    model_inputs = {**inputs(model.sizes), "guidance": None}
    with torch.no_grad():
        answer = model(**model_inputs)
        model.guidance_in = None
        assert torch.equal(answer, model(**model_inputs))


def test_time_and_guidance_stay_float32_up_to_the_embedding():
    """In bfloat16, 0.9983 * 1000 would become 1000; neighbouring steps must stay apart in a bfloat16 model too."""
    exact = sinusoids(torch.tensor([0.99839], dtype=torch.float64))
    torch.testing.assert_close(sinusoids(torch.tensor([0.99839])), exact.float(), rtol=0, atol=2e-4)
    assert exact.shape == (1, 256)
    model = made(sizes(guidance=False)).to(torch.bfloat16)
    dtypes = []
    model.time_in.register_forward_pre_hook(lambda _, given: dtypes.append(given[0]))
    model(**inputs(model.sizes))
    assert dtypes[0].dtype == torch.float32
    torch.testing.assert_close(dtypes[0], sinusoids(torch.tensor([0.1234, 0.987])))


def test_position_tables_are_exact_kept_and_bounded():
    model = made(sizes())
    text, image = torch.zeros(3, 3), ids(2, 2)
    table = model.positions(text, image)
    assert table.shape == (2, 7, 16) and table.dtype == torch.float32
    assert model.positions(text, image) is table
    assert torch.equal(model.positions(text, ids(2, 2)), table)
    far = rope(torch.tensor([[0.0, 1000.0, 0.0]]), (16, 56, 56))
    angle = 1000.0 * 10000.0 ** (-2 / 56)
    assert far[0, 0, 9].item() == pytest.approx(torch.tensor(angle, dtype=torch.float64).cos().item(), abs=1e-7)
    for i in range(50):
        model.positions(text, ids(1, i + 1))
    assert len(model._tables) <= 32


def test_bfloat16_without_autocast_and_float32_with_autocast_agree():
    model = made(sizes())
    model_inputs = inputs(model.sizes)
    exact = model(**model_inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(**model_inputs)
    half = made(sizes()).to(torch.bfloat16)(**model_inputs)
    assert half.dtype == torch.bfloat16
    for out in (cast, half):
        assert torch.nn.functional.cosine_similarity(out.flatten().float(), exact.flatten(), dim=0) > 0.99


def store_in_8_bits(model):
    for block in (*model.double_blocks, *model.single_blocks):
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                stored = module.weight.data.to(torch.float8_e4m3fn)
                module.weight = torch.nn.Parameter(stored, requires_grad=False)
    return model.requires_grad_(False)


def test_weights_stored_in_8_bits_are_widened_where_they_are_used():
    eight = store_in_8_bits(made(sizes()))
    wide = made(sizes()).requires_grad_(False)
    wide.load_state_dict({name: t.float() for name, t in eight.state_dict().items()})
    model_inputs = inputs(eight.sizes)
    model_inputs["img"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = eight(**model_inputs), wide(**model_inputs)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert model_inputs["img"].grad.isfinite().all()


@pytest.mark.slow
def test_one_graph_for_each_kind_of_block_over_all_buckets():
    """What compiling relies on: whatever the bucket, the text length and the block's place, the code is the same.

    In 8 bits and with a mask; without them, in compile/test_counts.py.
    """
    from torch._dynamo.utils import counters

    def prepared():
        model = made(sizes(double_blocks=3, single_blocks=3))
        store_in_8_bits(model)
        for name, parameter in model.named_parameters():  # as with adapters: only what is inside the blocks learns
            inside = "blocks" in name and parameter.dtype == torch.float32
            parameter.requires_grad_(inside and name.endswith("bias"))
        return model

    torch._dynamo.reset()
    counters.clear()
    eager, compiled = prepared(), prepared()
    # Backward passes in 8 bits are traced in memory/test_precision.py.
    how = Compile(compile=True, compile_backend="eager", compile_fullgraph=True)
    groups = [compiled.double_blocks, compiled.single_blocks]
    compile_model(how, compiled, groups, inputs=Family.block_inputs)
    for height, width, length in ((4, 6, 5), (3, 8, 5), (5, 5, 7), (2, 12, 9)):
        outs = []
        for model in (eager, compiled):
            model.zero_grad()
            mask = torch.arange(length).expand(2, length) < length - 1
            with torch.autocast("cpu", torch.bfloat16):
                outs.append(model(**inputs(model.sizes, height, width, length), txt_attention_mask=mask).float())
            outs[-1].square().sum().backward()
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
        for (name, a), (_, b) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
            if a.requires_grad:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-3, msg=name)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert eager.state_dict().keys() == compiled.state_dict().keys()


def test_frozen_double_blocks_have_no_backward():
    model = made(sizes()).requires_grad_(False)
    model.single_blocks.requires_grad_(True)
    calls = []
    model.double_blocks[0].img_mlp[0].register_full_backward_hook(lambda *_: calls.append(1))
    model(**inputs(model.sizes)).sum().backward()
    assert not calls and model.single_blocks[0].linear1.weight.grad is not None


def test_names_survive_the_way_to_diffusers_and_back():
    for guidance in (True, False):
        tensors = made(sizes(guidance=guidance)).state_dict()
        back = double_stream.flux_to_bfl(double_stream.flux_to_diffusers(tensors))
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_missing_diffusers_tensor_is_named():
    tensors = double_stream.flux_to_diffusers(made(sizes()).state_dict())
    del tensors["single_transformer_blocks.1.attn.to_k.bias"]
    with pytest.raises(KeyError, match=r"single_transformer_blocks.1.attn.to_k.bias"):
        double_stream.flux_to_bfl(tensors)


def test_prefixes_are_removed_from_keys():
    names = tensor_names.without_prefix(
        ["model.diffusion_model._orig_mod.img_in.weight", "vae.x", "model.diffusion_model.txt_in.bias"]
    )
    assert names == {
        "img_in.weight": "model.diffusion_model._orig_mod.img_in.weight",
        "txt_in.bias": "model.diffusion_model.txt_in.bias",
    }
    assert tensor_names.without_prefix(["double_blocks.0._orig_mod.img_attn.qkv.weight"]) == {
        "double_blocks.0.img_attn.qkv.weight": "double_blocks.0._orig_mod.img_attn.qkv.weight"
    }
