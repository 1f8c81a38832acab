"""A thousand steps over many sizes of image on a GPU, recorded or swapped, against the same steps taken eagerly.

python -m pytest -q -m gpu tests/compile/test_gpu_stress.py
"""

import random
from itertools import product

import pytest

from tests.training import config_of, demo, pictures, train  # noqa: F401 - fixtures, also without a conftest

STEPS = 1000
SCRIPTS = ("sdxl_train_network", "flux_train_network")
SIZES = [(width, height) for width, height in product((64, 128, 192, 256), repeat=2) if width * height <= 192 * 192]
# At such a rate two trainings stay together for a thousand steps, so that one wrong weight in one step shows.
SAME = {
    "resolution": "192",
    "enable_bucket": True,
    "bucket_no_upscale": True,
    "seed": 3,
    "max_train_steps": STEPS,
    "learning_rate": 1e-6,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "mixed_precision": "no",
}
EAGER = {"cuda_graphs": "false"}
WAITING = EAGER | {"cpu_offload_checkpointing": True, "blocks_to_swap": 4}
WAYS = {
    "recorded": {"cuda_graphs": "true"},
    "recorded, checkpointing": {"cuda_graphs": "true", "gradient_checkpointing": True},
    "compiled, recorded": {"compile": True, "cuda_graphs": "true"},
    "swapped": EAGER | {"gradient_checkpointing": True, "blocks_to_swap": 1},
    "compiled, swapped": EAGER | {"compile": True, "gradient_checkpointing": True, "blocks_to_swap": 1},
    "swapped, inputs on the host": WAITING,
    "compiled, swapped, inputs on the host": WAITING | {"compile": True},
    "compiled beside": {"compile": True, "compile_warmup": "beside", "cuda_graphs": "auto"},
}
# A whole model that learns, in blocks that are swapped: each is copied both ways.
ADAFACTOR = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False", "scale_parameter=False"]}
LEARNING = {
    "stepped on the device": ADAFACTOR | {"fused_backward_pass": True},
    "stepped on the host": {"optimizer_type": "AdamW"},
}
CASES = [*product(SCRIPTS, WAYS), *product(["flux_train"], LEARNING)]


@pytest.fixture(scope="module")
def many_sizes(tmp_path_factory):
    """Three pictures of each size, in any order, so that one size follows another as chance wants it."""
    sizes = SIZES * 3
    random.Random(5).shuffle(sizes)
    return pictures(tmp_path_factory.mktemp("many_sizes"), sizes, repeats=1)


@pytest.fixture(scope="module")
def eager(demo, many_sizes, tmp_path_factory):  # noqa: F811
    """What the same training learns eagerly, made once for each script and optimizer."""
    losses = {}

    def trained(script, way):
        values = SAME | EAGER | LEARNING.get(way, {})
        if (name := (script, way if way in LEARNING else "")) not in losses:
            folder = tmp_path_factory.mktemp("eager")
            losses[name] = train(config_of(demo, script, train_data_dir=many_sizes, output_dir=folder, **values))
        return losses[name]

    return trained


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "way"), CASES)
def test_a_thousand_steps_of_any_sizes_are_those_of_eager_blocks(script, way, demo, many_sizes, eager, tmp_path):  # noqa: F811
    plain = eager(script, way)
    values = WAYS[way] if way in WAYS else LEARNING[way] | EAGER | {"gradient_checkpointing": True, "blocks_to_swap": 4}
    losses_by_step = train(config_of(demo, script, train_data_dir=many_sizes, output_dir=tmp_path, **SAME | values))
    assert len(losses_by_step.losses) == len(plain.losses) == STEPS
    apart = [abs(a - b) / abs(b) for a, b in zip(losses_by_step.losses, plain.losses, strict=True)]
    pairs = zip(losses_by_step.tensors().values(), plain.tensors().values(), strict=True)
    weights = max((a.float() - b.float()).norm().item() / a.numel() ** 0.5 for a, b in pairs)
    print(f"{script}, {way}: losses differ by {max(apart):.1e}, weights by {weights:.1e}")
    assert max(apart) < 1e-3  # another image, another size's buffer or a block's older weights change it by far more
    assert weights < 0.05 * SAME["learning_rate"] * STEPS  # Adam moves a weight by up to its rate in a step
