"""What a profile means, tried on tables that are made up."""

import pytest

from library import families
from library.bench import profile_advice, profile_summary
from library.bench.profile_summary import ProfileRow as Row
from library.config.building import build_config, replace_options

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128"
PLAIN = "void at::native::vectorized_elementwise_kernel<4, add>"

CHECKPOINTED = {"compile": True, "gradient_checkpointing": True, profile_advice.MAY_KEEP_A_SHARE: True}


def facts(rows, step_ms=10.0, device="cuda", steps=2, **now):
    summary = profile_summary.summary(rows, steps, step_ms, device)
    memory_figures = {name: now.pop(name) for name in ("peak_gb", "memory_gb") if name in now}
    memory_figures["machine"] = {"capability": now.pop("capability", None)}
    return {**summary, **memory_figures, "set": {"mixed_precision": "bf16", "compile_mode": "default", **now}}


def rules(given):
    return [finding.rule for finding in profile_advice.judge(given)]


def kernels(**milliseconds):
    """Rows of kernels that take so many milliseconds in each of two steps."""
    names = {
        "gemm": GEMM,
        "plain": PLAIN,
        "flash": "flash_fwd_kernel",
        "adam": "multi_tensor_apply_kernel",
        "conv": "cudnn::implicit_gemm_conv",
        "h2d": "Memcpy HtoD (Pinned -> Device)",
        "d2h": "Memcpy DtoH",
        "fused": "triton_poi_fused_add_mul_0",
        "copy": "direct_copy_kernel_cuda",
        "cast": "vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>",
    }
    return [Row(names[name], 200, 2000.0 * ms, True) for name, ms in milliseconds.items()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM, "matrix products"),
        ("nvjet_hsh_128x256", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("triton_tem_fused_mm_1", "matrix products"),
        ("triton_red_fused_native_layer_norm_3", "compiled kernels"),
        ("## Call CompiledFxGraph", "compiled kernels"),
        ("pytorch_flash::flash_bwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::_to_copy", "copies"),
        (PLAIN, "elementwise"),
        ("aten::native_group_norm_backward", "norms and reductions"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::convolution_backward", "convolution"),
        ("autograd::engine::evaluate_function: MulBackward0", "bookkeeping"),
        ("aten::view", "bookkeeping"),
        ("who_knows", "other"),
        ("aten::new_empty", "bookkeeping"),
        ("at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel", "norms and reductions"),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128>", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "copies"),
        ("mkldnn::_linear_pointwise", "matrix products"),
        ("at::native::bfloat16tofloat32_copy_kernel_cuda", "copies"),
        ("aten::tanh", "elementwise"),
    ],
)
def test_operations_are_sorted_into_kinds(name, kind):
    assert profile_summary.kind(name) == kind


def test_a_table_is_added_up_per_step():
    rows = [
        *kernels(gemm=6.0, plain=2.0),
        Row("cudaLaunchKernel", 400, 900.0),
        Row("cuLaunchKernelEx", 100, 90.0),
        Row("aten::_local_scalar_dense", 4, 9.0),
        Row("cudaStreamSynchronize", 6, 5.0),
        Row("cudaDeviceSynchronize", 1, 5.0),
        Row("aten::_to_copy", 60, 10.0),
        Row("ProfilerStep#1", 2, 99999.0, True),
    ]
    summary = profile_summary.summary(rows, 2, 10.0, "cuda")
    assert summary["busy_ms"] == pytest.approx(8.0) and summary["idle"] == pytest.approx(0.2)
    assert summary["kinds"] == {"matrix products": 0.75, "elementwise": 0.25}
    assert (summary["launches"], summary["reads"], summary["syncs"], summary["casts"]) == (250, 2, 3, 30)
    assert summary["operations"][0] == {"name": GEMM, "kind": "matrix products", "calls": 100, "ms": 6.0, "share": 0.75}
    on_cpu = profile_summary.summary([Row("aten::mm", 4, 3000.0), Row("aten::add", 4, 1000.0)], 2, 10.0, "cpu")
    assert on_cpu["idle"] is None and on_cpu["kinds"]["matrix products"] == 0.75


def test_a_gpu_that_waits_is_told_to_compile_then_to_record_then_to_take_more():
    waiting = [*kernels(gemm=3.0), Row("cudaLaunchKernel", 5000, 1.0)]
    first, second = profile_advice.judge(facts(waiting))[:2]
    assert "Waiting dominates" in str(first.text) and "70%" in str(first.text)
    assert second.options == {"compile": True} and "2,500 kernels" in str(second.text)
    assert profile_advice.judge(facts(waiting, compile=True))[1].options == {"compile_mode": "reduce-overhead"}
    assert not profile_advice.judge(facts(waiting, compile=True, blocks_to_swap=8))[1].options


@pytest.mark.parametrize(
    ("times", "now", "rule", "options"),
    [
        ({"gemm": 6.0, "plain": 3.5}, {}, "fusing", {"compile": True}),
        (
            {"gemm": 5.0, "flash": 4.5},
            {"gradient_checkpointing": True},
            "attention",
            {"checkpoint_keep_attention": True},
        ),
        ({"gemm": 5.0, "flash": 4.5}, {"compile": True}, "attention", {}),
        ({"gemm": 8.0, "adam": 1.5}, {}, "optimizer", {}),
        ({"gemm": 6.0, "conv": 3.5}, {}, "convolution", {"cuda_cudnn_benchmark": True}),
        ({"gemm": 9.5}, {}, "products", {}),
        ({"gemm": 9.5}, {"mixed_precision": "no"}, "precision", {"mixed_precision": "bf16"}),
        (
            {"gemm": 9.5},
            {"compile": True, "network_module": "networks.lora", "capability": "9.0"},
            "products",
            {"fp8_base": True, "fp8_compute": True},
        ),
        ({"gemm": 9.5}, {"compile": True, "network_module": "networks.lora", "capability": "8.0"}, "products", {}),
        (
            {"gemm": 5.0, "plain": 4.5},
            {"compile": True, "compile_scope": "inner"},
            "fusing",
            {"compile_scope": "blocks"},
        ),
        (
            {"gemm": 3.0, "cast": 6.5},
            {"compile": True, "compile_scope": "blocks"},
            "fusing",
            {"compile_scope": "model"},
        ),
        (
            {"gemm": 3.0, "fused": 6.5},
            {**CHECKPOINTED, "peak_gb": 60.0, "memory_gb": 80.0},
            "streaming",
            {"compile_activation_budget": 0.5},
        ),
        ({"gemm": 3.0, "fused": 6.5}, {"compile": True}, "streaming", {"compile_mode": "max-autotune-no-cudagraphs"}),
        ({"gemm": 7.0, "h2d": 1.5, "d2h": 1.0}, {"blocks_to_swap": 20}, "swapping", {}),
        (
            {"gemm": 9.5},
            {"gradient_checkpointing": True, "peak_gb": 20.0, "memory_gb": 80.0},
            "recompute",
            {"gradient_checkpointing": False},
        ),
        (
            {"gemm": 9.5},
            {**CHECKPOINTED, "peak_gb": 20.0, "memory_gb": 80.0},
            "recompute",
            {"compile_activation_budget": 0.5},
        ),
    ],
)
def test_each_rule_sees_its_case_and_says_what_to_change(times, now, rule, options):
    findings = {finding.rule: finding for finding in profile_advice.judge(facts(kernels(**times), **now))}
    assert rule in findings
    assert dict(findings[rule].options) == options
    assert str(findings[rule].text).endswith(".")


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({}, True),
        ({"cpu_offload_checkpointing": True}, True),
        ({"compile_scope": "inner"}, False),
        ({"network_dropout": 0.1}, False),
        ({"compile": False}, False),
    ],
)
def test_what_is_advised_to_recompute_less_can_be_set_and_does(values, share):
    config_class = families.config_class("flux_train_network")
    config = build_config(config_class, {"compile": True, "gradient_checkpointing": True} | values, notes=[])
    settings = profile_advice.settings_for_advice(config) | {"peak_gb": 20.0, "memory_gb": 80.0}
    found = {one.rule: one.options for one in profile_advice.judge(facts(kernels(gemm=4.0, fused=6.0), **settings))}
    assert found["streaming"] == found["recompute"] and share == ("compile_activation_budget" in found["recompute"])
    advised = replace_options(config, **found["recompute"])
    assert not advised.memory.recomputes_all(advised)


def test_a_step_that_is_as_it_should_be_gets_no_advice():
    compiled = kernels(gemm=4.0, fused=3.0, flash=2.5)
    assert rules(facts(compiled, compile=True, peak_gb=60.0, memory_gb=80.0)) == ["dominant"]


def test_reading_numbers_from_the_gpu_is_reported():
    counts = [*kernels(gemm=9.5), Row("aten::_local_scalar_dense", 400, 1.0)]  # an optimizer's own, on the host
    assert "syncs" not in rules(facts(counts)) and facts(counts)["reads"] == 0
    waits = facts([*counts, Row("cudaStreamSynchronize", 41, 1.0)])
    assert "syncs" in rules(waits) and waits["reads"] == 20
    on_cpu = [Row("aten::mm", 4, 9000.0), Row("aten::_local_scalar_dense", 40, 1.0)]
    assert "syncs" not in rules(facts(on_cpu, device="cpu"))


def test_a_host_that_waits_too_often_is_named_before_anything_else():
    rows = [
        *kernels(gemm=3.0),
        Row("aten::_local_scalar_dense", 800, 1.0),
        Row("cudaStreamSynchronize", 801, 9e3),
        Row("cudaLaunchKernel", 4000, 1.0),
    ]
    first, second = profile_advice.judge(facts(rows, optimizer_type="Adafactor", compile=True))[:2]
    assert "Waiting dominates" in str(first.text) and "as the CPU waits for it 400 times" in str(first.text)
    assert second.rule == "syncs" and "Adafactor may be what reads them: try AdamW" in str(second.text)
    assert "Look for item" in str(profile_advice.judge(facts(rows))[1].text)


def test_a_profiler_that_may_not_see_the_gpu_calls_nothing_idle():
    summary = facts([Row("aten::mm", 4, 9000.0), Row("cudaLaunchKernel", 4000, 1000.0)])
    assert summary["blind"] and summary["idle"] is None
    first, *others = profile_advice.judge(summary)
    assert "may not look at this GPU" in str(first.text) and "90% of it goes into matrix products" in str(first.text)
    assert [finding.rule for finding in others] == ["products"]


def test_casts_outside_of_compiled_blocks_are_reported():
    rows = [*kernels(gemm=7.0, copy=2.0), Row("aten::_to_copy", 300, 1.0)]
    assert "casts" in rules(facts(rows, compile=True))


def test_the_text_has_the_verdict_and_the_changes():
    run_facts = facts([*kernels(gemm=3.0, plain=2.0), Row("cudaLaunchKernel", 5000, 1.0)])
    run_facts |= {"way": {"name": "eager", "options": {}}, "resolution": 1024, "matmul": None}
    run_facts |= {
        "subject": {"title": "SDXL, full size", "batch": 4},
        "machine": {"name": "GPU", "device": "cuda", "torch": "2.13"},
    }
    run_facts |= {"verdict": [vars(finding) for finding in profile_advice.judge(run_facts)]}
    text = profile_advice.profile_text(run_facts)
    assert "SDXL, full size, batch 4, eager at 1024" in text and "2,500 kernel launches" in text
    assert "1. Waiting dominates" in text and "(compile = true)" in text
