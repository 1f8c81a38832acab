"""Random weights for blocks as wide as the published models': drawing each of hundreds of millions takes seconds."""

import torch


def filled(network):
    """Fill a network on the meta device with random weights. Matrices are overlapping slices of one random table, and
    vectors are drawn one by one."""
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    table = torch.empty(max(shape.numel() for shape in shapes.values()) + len(shapes)).uniform_(-0.03, 0.03)

    def weight(place, name, shape):
        if len(shape) == 1:
            return float("bias" not in name) + 0.1 * torch.randn(shape)
        return table[place : place + shape.numel()].view(shape)

    tensors = {name: weight(place, name, shape) for place, (name, shape) in enumerate(shapes.items())}
    network.load_state_dict(tensors, assign=True)
    return network
