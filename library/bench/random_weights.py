"""Random weights for a network of any size, and a check of the available memory. Speed does not depend on values."""

import torch
from torch import Tensor, nn

from library.bench import machine
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.families.shared.random_networks import RANDOM_VALUES

BYTES_PER_GIB = 2**30


def place_weights(model: nn.Module, device: torch.device, dtype: torch.dtype, config: RunConfig) -> torch.device:
    """Return where weights are created: on the device, or on the host if some stay there, are rounded later, or only
    fit in few bits.

    Raises ConfigError if they do not fit.
    """
    precision = config.precision
    # A training rounds these one after the other as it reads them: in 16 bits they are never on the GPU together.
    is_rounded_later = precision.int8_base or precision.nf4_denoiser
    too_large = device.type == "cuda" and weight_bytes(model, dtype) > 0.9 * machine.free_bytes(device)
    if is_rounded_later and device.type == "cuda" and not config.memory.blocks_to_swap:
        return torch.device("cpu")  # where matrices share memory until they are rounded
    if config.memory.moves_weights(config) or precision.fp8_denoiser and too_large:
        device = torch.device("cpu")
    check_room(model, device, dtype)
    return device


def check_room(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the weights do not fit."""
    # A machine without memory may kill other programs.
    needed, free = weight_bytes(model, dtype), machine.free_bytes(device)
    if needed > free:
        raise ConfigError(
            "{network} needs {needed} GB and {free} GB are free on {device}: "
            "measure --size tiny here, or a TOML with fp8_base or blocks_to_swap",
            network=type(model).__name__,
            needed=f"{needed / BYTES_PER_GIB:.0f}",
            free=f"{free / BYTES_PER_GIB:.0f}",
            device=device.type,
        )


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


@torch.no_grad()
def fill_randomly(model: nn.Module, device: torch.device, dtype: torch.dtype, waits_on_host: bool = False) -> nn.Module:
    """Create random weights on the device, scaled to preserve the signal's size.

    If they only wait on the host to be copied, matrices with rows of equal length share memory.
    """
    generator = torch.Generator(device).manual_seed(0)
    copies: dict[int, nn.Parameter] = {}
    shared: dict[int, Tensor] = {}
    if waits_on_host:
        for p in (p for p in model.parameters() if p.ndim >= 2):
            shared[_fan_in(p)] = max(shared.get(_fan_in(p), p), p, key=Tensor.numel)
        shared = {inputs: _random("", p, device, dtype, generator).view(-1) for inputs, p in shared.items()}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in copies and waits_on_host and p.ndim >= 2:
                copies[id(p)] = nn.Parameter(torch.empty(0, dtype=dtype))
                copies[id(p)].data = shared[_fan_in(p)][: p.numel()].view(p.shape)  # with its own version counter
            elif id(p) not in copies:
                copies[id(p)] = nn.Parameter(_random(name, p, device, dtype, generator))
            setattr(module, name, copies[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _fan_in(weight: Tensor) -> int:
    return weight[0].numel()


def _random(name: str, like: Tensor, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    tensor = torch.empty(like.shape, device=device, dtype=dtype)
    if like.ndim < 2:
        return tensor.fill_(1.0 if name in ("weight", "scale") else 0.0)
    flat = tensor.view(-1)
    drawn = flat[:RANDOM_VALUES]  # drawing all values would take minutes on a CPU
    drawn.normal_(0.0, 0.7 / _fan_in(like) ** 0.5, generator=generator)
    for start in range(RANDOM_VALUES, flat.numel(), RANDOM_VALUES):
        piece = flat[start : start + RANDOM_VALUES]
        piece.copy_(drawn[: piece.numel()])
    return tensor
