"""Networks used as they will be used, in the middle of learning: for sample images and for validation."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from library.train import optimizers


@contextlib.contextmanager
def evaluation_mode(networks: Iterable[torch.nn.Module], run: Any) -> Iterator[None]:
    """Networks in evaluation mode and without compiled blocks, nothing learns; afterwards all is as before.

    A compiled block would need other graphs here, and compiling them would cost more than running eagerly. Raises
    WorkCancelled out of the first network when somebody wants the training to end now.
    """
    networks = list(networks)
    hook = networks[0].register_forward_pre_hook(lambda *given: run.wishes.hurry())
    # One by one: adapters are in training mode inside of a denoiser that is not.
    modes = [(module, module.training) for network in networks for module in network.modules()]
    for module, _ in modes:
        module.training = False
    try:
        eagerly = torch.compiler.set_stance("force_eager")
        with eagerly, torch.no_grad(), run.autocast(), optimizers.averaged(run.optimizer):
            yield
    finally:
        hook.remove()
        for module, mode in modes:
            module.training = mode
