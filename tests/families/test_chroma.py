"""Chroma: FLUX.1's blocks, steered by an approximator and by words that are masked, against diffusers' model of it."""

import pytest
import torch

from library.families.flux import keys
from tests.families import test_flux_model as flux_model

SIZES = flux_model.sizes(guidance=False, vector_channels=0, approximator=(64, 32, 2))


def oracle(model):
    diffusers = pytest.importorskip("diffusers")
    of = model.sizes
    channels, width, layers = of.approximator
    other = diffusers.ChromaTransformer2DModel(
        in_channels=of.in_channels,
        num_layers=of.double_blocks,
        num_single_layers=of.single_blocks,
        attention_head_dim=of.head,
        num_attention_heads=of.hidden // of.head,
        joint_attention_dim=of.text_channels,
        axes_dims_rope=of.axes,
        approximator_num_channels=channels,
        approximator_hidden_dim=width,
        approximator_layers=layers,
    )
    other.load_state_dict(keys.to_diffusers(model.state_dict()), strict=True)
    other.distilled_guidance_layer.requires_grad_(False)
    return other


def test_outputs_and_gradients_equal_those_of_diffusers():
    """Its mask has to be given as booleans: as numbers, which its pipeline gives, they are added to the scores."""
    ours = flux_model.made(SIZES)
    theirs = oracle(ours)
    mine, other = ({**flux_model.inputs(ours.sizes), "y": None} for _ in range(2))
    for given in (mine, other):
        given["img"].requires_grad_(), given["txt"].requires_grad_()
    text_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    out = ours(**mine, txt_attention_mask=text_mask)
    expected = theirs(
        hidden_states=other["img"],
        encoder_hidden_states=other["txt"],
        timestep=other["timesteps"],
        img_ids=other["img_ids"],
        txt_ids=other["txt_ids"],
        attention_mask=ours.joint_mask(text_mask, mine["img"]),
        return_dict=False,
    )[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for name in ("img", "txt"):
        torch.testing.assert_close(mine[name].grad, other[name].grad, rtol=1e-3, atol=1e-4, msg=name)
    zeros = {name: torch.zeros_like(p) for name, p in theirs.named_parameters()}
    grads = {name: zeros[name] if p.grad is None else p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if name.startswith("distilled_guidance_layer."):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, keys.to_bfl(grads)[name], rtol=1e-3, atol=1e-4, msg=name)
