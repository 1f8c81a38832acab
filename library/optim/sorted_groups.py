"""Optimizers of pytorch_optimizer that require sorted weights, behind ordinary parameter groups."""

from collections.abc import Iterable
from typing import Any

import pytorch_optimizer
import torch

Groups = Iterable[dict[str, Any]]


class Muon(pytorch_optimizer.Muon):
    """Muon for matrices (including convolution kernels), and AdamW for all other weights.

    Each group becomes two of the same name and rate, if it has weights of both kinds.
    """

    def __init__(self, params: Groups, lr: float, **arguments: Any) -> None:
        sorted_groups = []
        for group in params:
            weights = list(group["params"])
            for matrices in (True, False):
                if weights_of_kind := [p for p in weights if (p.dim() > 1) == matrices]:
                    sorted_groups.append({"lr": lr, **group, "params": weights_of_kind, "use_muon": matrices})
        super().__init__(sorted_groups, lr=lr, **arguments)


class AdamMini(pytorch_optimizer.AdamMini):
    """Adam with one step scale per tensor, which saves half of the optimizer's memory.

    The package requires a model, and recognises attention heads of language models by weight names; here every tensor
    is one block.
    """

    def __init__(self, params: Groups, lr: float, **arguments: Any) -> None:
        self._given = [{"name": f"group{i}", **group} for i, group in enumerate(params)]
        super().__init__(torch.nn.Module(), lr=lr, **arguments)

    def get_optimizer_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        return [{**group, "weight_decay": weight_decay} for group in self._given]
