"""Losses of short trainings on a GPU, in each way of computing them, against those that were made on a GPU and kept.

./setup.sh test -m gpu                            # compares
KOHYA_RECORD_GPU_LOSSES=1 ./setup.sh test -m gpu  # writes tests/golden/gpu_losses.json anew
"""

import json
import os
from itertools import product

import pytest
import torch

from library import families
from library.files import write_atomic
from tests.source import ROOT
from tests.training import SCRIPTS, config_of, demo, shapes, train  # noqa: F401 - fixtures, also without a conftest

KEPT = ROOT / "tests/golden/gpu_losses.json"
SAME = {"resolution": "96", "enable_bucket": True, "seed": 3, "max_train_steps": 8, "cuda_graphs": "false"}
EXACT, BF16 = {"mixed_precision": "no"}, {"mixed_precision": "bf16"}
COMPILED, RECORDED = {"compile": True}, {"cuda_graphs": "true"}
SWAPPED = {"gradient_checkpointing": True, "blocks_to_swap": 1}
WAYS = {
    "eager": EXACT,
    "eager bf16": BF16,
    "checkpointing": EXACT | {"gradient_checkpointing": True},
    "recorded": EXACT | RECORDED,
    "compiled": EXACT | COMPILED,
    "compiled, recorded": EXACT | COMPILED | {"cuda_graphs": "auto", "compile_mode": "reduce-overhead"},
    "swapped": EXACT | SWAPPED,
    "compiled, swapped": EXACT | COMPILED | SWAPPED,
}
FROZEN = {  # for adapters only: the weights that learn have 16 bits or more
    "fp8 weights": BF16 | {"fp8_base": True},
    "fp8 weights, compiled, recorded": BF16 | COMPILED | RECORDED | {"fp8_base": True},
    "fp8 products, compiled": BF16 | COMPILED | {"fp8_base": True, "fp8_compute": True},
    "fp8 products, weights stored twice, compiled": BF16
    | COMPILED
    | {"fp8_base": True, "fp8_compute": True, "fp8_transposed_weights": True},
    "int8 products, compiled, swapped": BF16 | COMPILED | SWAPPED | {"int8_base": True, "int8_compute": True},
    "int8 weights": BF16 | {"int8_base": True},
    "int8 weights, compiled, swapped": BF16 | COMPILED | SWAPPED | {"int8_base": True},
}
ALIKE = {"fp8 products, weights stored twice, compiled": "fp8 products, compiled"}  # ways with the losses of others
WHOLE = {"optimizer_type": "AdamW", "fused_backward_pass": False, "learning_rate": 1e-5}
CASES = [
    *product(SCRIPTS, WAYS),
    *((script, way) for script, way in product(SCRIPTS, FROZEN) if families.config_class(script).adapters),
]


def tolerance(script: str, way: str, machine: str, kept_on: str) -> float:
    """Relative. cuDNN adds up in any order; another GPU or PyTorch has other kernels, which 8 and 16 bits show.

    The LoRA of SD 1.5's tiny U-Net is 20 times as sensitive as SDXL's to the rounding of its convolutions, which
    multiply in TF32.
    """
    coarse = way in FROZEN or "bf16" in way
    if machine == kept_on:
        return 2e-3 if coarse else 4e-3 if script == "train_network" else 3e-4
    return 2e-2 if coarse or script == "train_network" else 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "way"), CASES)
def test_losses_are_those_that_were_kept(script, way, demo, shapes, tmp_path):  # noqa: F811
    values = SAME | (WHOLE if not families.config_class(script).adapters else {"learning_rate": 1e-3})
    values |= (WAYS | FROZEN)[way]
    losses = train(config_of(demo, script, train_data_dir=shapes, output_dir=tmp_path, **values)).losses
    assert len(losses) == SAME["max_train_steps"] and min(losses) > 0
    recorded = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"machine": "", "losses": {}}
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    name = f"{script}: {ALIKE.get(way, way)}"
    if os.environ.get("KOHYA_RECORD_GPU_LOSSES") and way not in ALIKE:
        recorded = {"machine": machine, "losses": recorded["losses"] | {name: [round(loss, 6) for loss in losses]}}
        write_atomic(KEPT, json.dumps(recorded, indent=1) + "\n")
    assert name in recorded["losses"], "set KOHYA_RECORD_GPU_LOSSES=1 once, on a GPU"
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, recorded["losses"][name], strict=True))
    print(f"{name}: apart by {apart:.1e}, made on {recorded['machine']}")
    assert apart < tolerance(script, way, machine, recorded["machine"])
