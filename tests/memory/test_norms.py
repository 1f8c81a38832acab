"""GroupNorm with channels last: the same numbers, another order in memory."""

import copy

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from library.memory import channels_last
from tests import training


def both():
    torch.manual_seed(0)
    own = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU())
    nn.init.normal_(own[0].weight), nn.init.normal_(own[0].bias)
    ours = copy.deepcopy(own)
    channels_last.keep_channels_last(ours)
    return own, ours


def test_channels_last_keeps_the_norm_and_its_gradients():
    own, ours = both()
    x = torch.randn(2, 16, 6, 5, requires_grad=True)
    again = x.detach().to(memory_format=torch.channels_last).requires_grad_(True)
    wanted, actual = own(x), ours(again)
    torch.testing.assert_close(actual, wanted)
    wanted.square().sum().backward(), actual.square().sum().backward()
    torch.testing.assert_close(again.grad, x.grad)
    for a, b in zip(ours.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert [*ours.state_dict()] == [*own.state_dict()] and type(ours[0]).__name__ == "GroupNorm"


def test_channels_stay_last():
    _, ours = both()
    x = torch.randn(2, 16, 6, 5).to(memory_format=torch.channels_last)
    assert ours(x).is_contiguous(memory_format=torch.channels_last)


def test_half_precision_is_normed_in_float32():
    own, ours = both()
    x = torch.randn(2, 16, 6, 5).bfloat16() + 100
    torch.testing.assert_close(ours.bfloat16()(x).float(), own.float()(x.float()), rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours[0](x).dtype == torch.float32


def test_rows_of_other_shapes_go_the_usual_way():
    own, ours = both()
    x = torch.randn(3, 16, 7)
    assert torch.equal(ours(x), own(x))


def test_a_residual_block_that_learns_keeps_only_images_with_channels_last():
    """Inductor takes the strides of others, of the first size of image, for those of all sizes."""
    block = ResnetBlock2D(in_channels=64, out_channels=32, temb_channels=8).to(memory_format=torch.channels_last)
    inputs = torch.randn(2, 64, 6, 4).to(memory_format=torch.channels_last).requires_grad_()
    time = torch.randn(2, 8)

    def run():
        outputs = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: outputs.append(x) or x, lambda x: x):
            answer = block.train()(inputs, time)
        images = [x for x in outputs if x.dim() == 4 and x.shape[-2:] == (6, 4)]
        return answer, [x.is_contiguous(memory_format=torch.channels_last) for x in images]

    plain, before = run()
    channels_last.keep_channels_last(block)
    answer, after = run()
    assert after and all(after) and not all(before)
    torch.testing.assert_close(answer, plain)
    assert type(block.conv_shortcut).__name__ == "Conv2d"


def test_norms_learn_in_front_of_everything_else_that_does(demo, squares, tmp_path):
    """Behind blocks whose rate is 0, PyTorch's own ended the process on a CPU."""
    rates = ",".join(["0"] * 8 + ["1e-4"] * 15)
    values = {"train_data_dir": squares, "output_dir": tmp_path, "block_lr": rates, "max_train_steps": 1}
    assert len(training.train(training.config_of(demo, "sdxl_train", **values)).losses) == 1
