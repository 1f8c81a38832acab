"""Whole trainings whose denoiser is recorded as CUDA graphs, against the same without: on a GPU, in one command.

python -m pytest -q -m gpu tests/compile
"""

import logging

import pytest
import torch

from library.compiler import flat_memory
from library.optim.flat_adamw import FlatAdamW
from tests.training import config_of, demo, shapes, train  # noqa: F401 - fixtures, also without a conftest

SDXL, FLUX, CKPT = "sdxl_train_network", "flux_train_network", {"gradient_checkpointing": True}
EXACT = {
    "resolution": "96",
    "mixed_precision": "no",
    "max_train_steps": 9,
    "enable_bucket": True,
    "seed": 3,
    "learning_rate": 1e-3,
}
TEXT = {
    "network_train_unet_only": False,
    "cache_text_encoder_outputs": False,
    "cache_text_encoder_outputs_to_disk": False,
}
DROPOUT = {"network_dropout": 0.3, "network_args": ["rank_dropout=0.2", "module_dropout=0.1"]}
WHOLE = {"optimizer_type": "AdamW", "fused_backward_pass": False, "learning_rate": 1e-5}
WAYS = {
    "plain": (SDXL, {}),
    "checkpointing": (SDXL, CKPT),
    "dropout": (SDXL, DROPOUT),
    "checkpointing with dropout": (SDXL, {**CKPT, **DROPOUT}),
    "attention kept, dropout": (FLUX, {**CKPT, "checkpoint_keep_attention": True, "network_dropout": 0.3}),
    "flux checkpointing": (FLUX, CKPT),
    "ggpo": (FLUX, {**CKPT, "network_args": ["ggpo_sigma=0.03", "ggpo_beta=0.01"]}),
    "accumulation and average": (FLUX, {**CKPT, "gradient_accumulation_steps": 2, "ema_decay": 0.9}),
    "text encoders learn": (SDXL, {**CKPT, **TEXT}),
    "fp16": (SDXL, {**CKPT, "mixed_precision": "fp16"}),
    "validation and previews": (
        SDXL,
        {
            **CKPT,
            **DROPOUT,
            "validation_split": 0.2,
            "validate_every_n_steps": 3,
            "sample_every_n_steps": 4,
            "sample_prompts": "prompts.txt",
        },
    ),
    "whole model": ("sdxl_train", WHOLE | CKPT),
    "whole model, fused": (
        "flux_train",
        {
            **CKPT,
            "optimizer_type": "Adafactor",
            "fused_backward_pass": True,
            "max_grad_norm": 0.0,
            "learning_rate": 1e-5,
            "optimizer_args": ["relative_step=False", "scale_parameter=False", "warmup_init=False"],
        },
    ),
    "compiled": (SDXL, {"compile": True, **CKPT, **DROPOUT}),
    "checkpoints outside": (FLUX, {"compile": True, "compile_scope": "inner", **CKPT, "network_dropout": 0.3}),
    "some blocks compiled": (FLUX, {"compile": True, "compile_blocks": "double:all", **CKPT, "network_dropout": 0.3}),
}

CAN_LIE, APART = flat_memory.can_lie, lambda _tensor: False


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_same_training_without(way, demo, shapes, tmp_path, caplog):  # noqa: F811
    """FLUX.1's are equal to the last bit. Convolutions add up in any order, also without recording."""
    script, values = WAYS[way]
    (tmp_path / "prompts.txt").write_text("a zorb toy --w 64 --h 64 --s 2", encoding="utf-8")
    values = {name: tmp_path / value if value == "prompts.txt" else value for name, value in values.items()}
    losses, ends, recorded = {}, {}, {}
    with caplog.at_level(logging.INFO):
        for graphs in ("false", "true"):
            caplog.clear()
            config = config_of(
                demo, script, train_data_dir=shapes, output_dir=tmp_path / graphs, cuda_graphs=graphs, **EXACT | values
            )
            outcome = train(config)
            losses[graphs], ends[graphs], recorded[graphs] = outcome.losses, outcome.tensors(), caplog.text
    # Compiled blocks of FLUX.1 see a number of tokens, which is the same for an image and for the same one turned.
    sizes = 2 if script.startswith("flux_train") and values.get("compile") else 3
    assert recorded["true"].count("Recorded CUDA graphs") >= sizes and "Recorded" not in recorded["false"]
    assert "not recorded" not in recorded["true"]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
    pairs = [(weight, ends["true"][name]) for name, weight in ends["false"].items()]
    apart = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    print(f"{way}: losses differ by {worst:.1e}, weights by {apart:.1e}")
    assert worst < (1e-6 if script.startswith("flux_train") else 3e-4)


UNCLIPPED = {"max_grad_norm": 0.0}  # the clipping norm's order of summation differs
IN_ONE_MEMORY = {
    "plain": (FLUX, UNCLIPPED, 0.0),
    "clipped": (FLUX, {"max_grad_norm": 0.01}, 1e-5),
    "not recorded": (FLUX, UNCLIPPED | {"cuda_graphs": "false"}, 0.0),
    "bf16 and two rates": (FLUX, UNCLIPPED | {"mixed_precision": "bf16", "network_args": ["loraplus_lr_ratio=4"]}, 0.0),
    "fp16": (FLUX, UNCLIPPED | {"mixed_precision": "fp16"}, 0.0),
    "accumulation and average": (FLUX, UNCLIPPED | {"gradient_accumulation_steps": 2, "ema_decay": 0.9}, 0.0),
    "compiled": (FLUX, UNCLIPPED | {"compile": True, **CKPT}, 0.0),
    "convolutions": (SDXL, UNCLIPPED | {"network_args": ["conv_dim=4", "conv_alpha=1"]}, 3e-4),
    "text encoders learn": (SDXL, UNCLIPPED | TEXT, 3e-4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", IN_ONE_MEMORY)
def test_factors_in_one_memory_learn_the_same(way, demo, shapes, tmp_path, monkeypatch):  # noqa: F811
    """FLUX.1's to the last bit, and without clipping also the saved weights."""
    script, values, tolerance = IN_ONE_MEMORY[way]
    outcomes, stepped, real = {}, [], FlatAdamW._instead_of_weights
    monkeypatch.setattr(
        FlatAdamW, "_instead_of_weights", lambda self, pairs: stepped.append(len(pairs)) or real(self, pairs)
    )
    for together in (False, True):
        monkeypatch.setattr(flat_memory, "can_lie", CAN_LIE if together else APART)
        options = {"cuda_graphs": "true"} | EXACT | values
        folder = tmp_path / str(together)
        outcomes[together] = train(config_of(demo, script, train_data_dir=shapes, output_dir=folder, **options))
        assert len(stepped) == (EXACT["max_train_steps"] if together else 0)
    losses = [outcome.losses for outcome in outcomes.values()]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    ends = [outcome.tensors() for outcome in outcomes.values()]
    apart = max((ends[0][name].float() - ends[1][name].float()).abs().max().item() for name in ends[0])
    print(f"{way}: losses differ by {worst:.1e}, weights by {apart:.1e}, {max(stepped)} runs")
    assert ends[0].keys() == ends[1].keys() and worst <= tolerance and (tolerance or not apart)
    assert max(stepped) <= 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"blocks_to_swap": 1}, "not recorded: blocks_to_swap moves weights"),
        ({"cpu_offload_checkpointing": True}, "not recorded: cpu_offload_checkpointing moves inputs"),
        ({"max_train_steps": 20}, "the batches (20) are too few for the image sizes (3)"),
        ({}, "Recorded CUDA graphs"),
    ],
)
def test_what_is_recorded_by_itself_or_why_not_is_reported(changes, told, demo, shapes, tmp_path):  # noqa: F811
    values = EXACT | {"max_train_steps": 30} | changes
    outcome = train(config_of(demo, SDXL, train_data_dir=shapes, output_dir=tmp_path, **values))
    assert told in (outcome.folder / "log.txt").read_text(encoding="utf-8")


@pytest.mark.gpu
def test_what_the_processor_draws_is_not_recorded(caplog):
    from library.compiler import cudagraph
    from library.compiler.plan import CompilePlan

    class Skips(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(torch.rand(1) < 0.5)

    model = Skips(8, 8).cuda()
    cudagraph.record_denoiser_calls(model, CompilePlan())
    for _ in range(3):
        model(torch.randn(2, 8, device="cuda")).sum().backward()
    assert "the processor draws random numbers" in caplog.text and not model._recorder.recordings


@pytest.mark.gpu
def test_what_waits_for_the_gpu_is_not_recorded_and_leaves_nothing_behind(caplog):
    from library.compiler import cudagraph
    from library.compiler.plan import CompilePlan

    class Waits(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)

    model = Waits(8, 8).cuda()
    expected = torch.nn.Linear(8, 8).cuda()
    expected.load_state_dict(model.state_dict())
    cudagraph.record_denoiser_calls(model, CompilePlan())
    x = torch.ones(2, 8, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
        expected(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, expected.weight.grad)
    assert "could not record them" in caplog.text
    reserved = torch.cuda.memory_reserved()
    large = torch.empty(2**28, device="cuda")
    del large
    torch.cuda.empty_cache()  # which does nothing where PyTorch believes that a graph is being captured
    assert torch.cuda.memory_reserved() <= reserved
    torch.randn(3, device="cuda")


@pytest.mark.gpu
def test_all_sizes_share_their_memory():
    from library.compiler import cudagraph
    from library.compiler.plan import CompilePlan

    model = torch.nn.Sequential(*[m for _ in range(30) for m in (torch.nn.Linear(512, 512), torch.nn.GELU())]).cuda()
    cudagraph.record_denoiser_calls(model, CompilePlan())
    held = []
    for rows in (4096, 4000, 3900, 3000, 2048):
        model(torch.randn(rows, 512, device="cuda")).sum().backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    print([round(one / 2**20) for one in held])
    assert len(model._recorder.recordings) == 5 and held[-1] < 1.2 * held[0]
