"""Which layers of a model in diffusers can carry an adapter, and of which size."""

from typing import Any

ADAPTER = (".lora_A.weight", ".lora_B.weight")
Sizes = dict[str, tuple[int, int]]


def layers(model: Any) -> Sizes:
    """Output and input features of everything in a model that can carry an adapter."""
    shapes = {
        name: tuple(m.weight.shape[:2]) for name, m in model.named_modules() if getattr(m, "weight", None) is not None
    }
    return {name: shape for name, shape in shapes.items() if len(shape) == 2}
