"""What is chosen on a GPU, by rules that can be read without one; how fast it is has to be measured there."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from library import families
from library.compiler import blocks as compile_utils
from library.compiler import cache, cudagraph
from library.compiler.log import CompileLog
from library.compiler.plan import CompilePlan
from library.compiler.torch_private import config_module, sdp_priority_order
from library.compiler.torch_settings import THREAD_SETTINGS, keep_torch_settings, wanted_settings
from library.config.building import build_config
from library.config.problems import ConfigError
from library.memory import attention, prepare
from library.memory.compile_targets import compiles_size_by_size
from library.train.compiling.precompile import graphs_sentence

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to have a GPU of some compute capability."""

    def pretend(capability, cudnn=91000):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    with attention.keep_attention_settings():
        yield pretend


def test_cudnn_attention_comes_first_on_hopper_and_the_others_stay_in_line(gpu):
    gpu((9, 0))
    before = sdp_priority_order()
    assert attention.prefer(CUDA) == "CUDNN_ATTENTION"
    order = sdp_priority_order()
    assert order[:4] == [3, 1, 2, 0] and sorted(order) == sorted(before)


@pytest.mark.parametrize(("capability", "cudnn"), [((8, 0), 91000), ((12, 0), 91000), ((9, 0), 8900), ((9, 0), None)])
def test_other_gpus_and_old_versions_keep_pytorchs_order(gpu, capability, cudnn):
    gpu(capability, cudnn)
    before = sdp_priority_order()
    assert attention.prefer(CUDA) == attention.PYTORCHS_ORDER
    assert sdp_priority_order() == before


def test_the_cpu_has_nothing_to_choose():
    assert attention.prefer(torch.device("cpu")) == ""


def config(script="flux_train_network", **values):
    return build_config(families.config_class(script), values)


def test_the_switches_are_set_and_taken_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    with attention.keep_attention_settings():
        for on in (True, False):
            attention.switches(config(cuda_allow_tf32=on, cuda_cudnn_benchmark=on).compile)
            assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
            assert torch.backends.cudnn.benchmark is on
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)


@pytest.mark.parametrize("script", ["flux_train_network", "sdxl_train_network"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("moving", [{"blocks_to_swap": 2}, {"cpu_offload_checkpointing": True}])
def test_recorded_graphs_and_moving_memory_exclude_each_other(script, mode, moving):
    with pytest.raises(ConfigError, match=f"compile_mode = {mode} .*{next(iter(moving))}") as refused:
        config(script, compile=True, compile_mode=mode, **moving)
    assert len(str(refused.value).splitlines()) == 1
    config(script, compile=False, compile_mode=mode, **moving)
    config(script, compile=True, compile_mode="max-autotune-no-cudagraphs", **moving)


@pytest.mark.parametrize("outside", [{"compile_scope": "inner"}, {"compile_blocks": "double:all"}])
def test_recorded_graphs_may_have_checkpoints_outside_of_compiled_blocks(outside):
    run_config = config(compile=True, compile_mode="reduce-overhead", gradient_checkpointing=True, **outside)
    assert run_config.compile.records_graphs and not run_config.compile.why_not_recorded(run_config)


@pytest.mark.parametrize("script", ["flux_train_network", "sdxl_train_network", "flux_train", "sdxl_train"])
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, ""),
        ({"gradient_checkpointing": True}, ""),
        ({"compile": True}, ""),
        ({"cuda_graphs": "true"}, ""),
        ({"cuda_graphs": "false"}, "cuda_graphs is false"),
        ({"cpu_offload_checkpointing": True}, "cpu_offload_checkpointing moves inputs"),
        ({"compile": True, "compile_mode": "max-autotune-no-cudagraphs"}, "compile_mode is max-autotune-no-cudagraphs"),
        ({"compile": True, "compile_backend": "cudagraphs"}, "the backend cudagraphs records by itself"),
    ],
)
def test_what_is_recorded_and_why_not(script, values, why):
    run_config = config(script, **values)
    assert run_config.compile.why_not_recorded(run_config) == why


def test_swapped_blocks_are_not_recorded():
    swapped_problems = config(blocks_to_swap=2, gradient_checkpointing=True)
    assert swapped_problems.compile.why_not_recorded(swapped_problems) == "blocks_to_swap moves weights"
    with pytest.raises(ConfigError, match="cuda_graphs = true needs weights at fixed .*use auto"):
        config(blocks_to_swap=2, cuda_graphs="true")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_that_records_contradicts_cuda_graphs_being_off(mode):
    with pytest.raises(ConfigError, match=f"cuda_graphs = false disables what compile_mode = {mode} is for"):
        config(compile=True, compile_mode=mode, cuda_graphs="false")
    config(compile=False, compile_mode=mode, cuda_graphs="false")
    with pytest.raises(ConfigError, match="cuda_graphs = true records what compile_mode = .* asks not to"):
        config(compile=True, compile_mode="max-autotune-no-cudagraphs", cuda_graphs="true")


@pytest.mark.parametrize("way", [{"compile_backend": "cudagraphs"}, {"compile_blocks": "transformer:all=cudagraphs"}])
def test_a_backend_that_records_cannot_be_told_not_to(way):
    with pytest.raises(ConfigError, match="cuda_graphs = false disables what the backend cudagraphs is for"):
        config(compile=True, cuda_graphs="false", **way)


@pytest.mark.parametrize(
    ("values", "reserved"),
    [({}, True), ({"cuda_graphs": "true"}, False), ({"cuda_graphs": "false"}, None), ({"blocks_to_swap": 2}, None)],
)
def test_what_is_recorded_by_itself_leaves_room_for_the_optimizer(monkeypatch, values, reserved):
    """Eager blocks too, on one GPU or several; only where these average each gradient as it comes, none."""
    attached = []
    monkeypatch.setattr(cudagraph, "record_denoiser_calls", lambda model, plan, reserve=None: attached.append(reserve))
    model, asked = nn.Linear(4, 4), config(gradient_checkpointing=True, **values)
    why = prepare._record_graphs(model, asked, CUDA, CompilePlan())
    assert [found is not None for found in attached] == ([] if reserved is None else [reserved])
    assert bool(why) is (reserved is None)
    assert not prepare._record_graphs(model, asked, torch.device("cpu"), CompilePlan()) and len(attached) <= 1
    monkeypatch.setattr(prepare, "several_processes", lambda: True)
    assert bool(prepare._record_graphs(model, asked, CUDA, CompilePlan())) is (reserved is None)
    if reserved is True:
        whole = config("flux_train", fused_backward_pass=True, optimizer_type="Adafactor", max_grad_norm=0.0)
        why = prepare._record_graphs(model, whole, CUDA, CompilePlan())
        assert why == "several processes train with fused_backward_pass"


@pytest.mark.parametrize("several", [False, True])
def test_a_recording_that_a_mode_asked_for_is_let_go_where_several_processes_step_early(monkeypatch, several, caplog):
    monkeypatch.setattr(prepare, "several_processes", lambda: several)
    monkeypatch.setattr(cudagraph, "leave_default_stream", lambda: None)
    model = nn.Linear(4, 4)
    cudagraph.record_denoiser_calls(model, CompilePlan())
    whole = config("flux_train", fused_backward_pass=True, optimizer_type="Adafactor", max_grad_norm=0.0)
    assert bool(prepare._record_graphs(model, whole, CUDA, CompilePlan())) is several
    assert bool(model._recorder.why_not) is several


def test_on_a_gpu_a_whole_model_has_a_graph_for_each_size_unless_asked_otherwise():
    whole, blocks = config(compile=True, compile_scope="model"), config(compile=True)
    assert compiles_size_by_size(whole, CUDA)
    assert not compiles_size_by_size(whole, torch.device("cpu"))
    assert not compiles_size_by_size(blocks, CUDA)
    assert not compiles_size_by_size(config(compile=True, compile_scope="model", compile_dynamic="true"), CUDA)
    sentence = graphs_sentence(whole.compile, 3, single=True)
    assert sentence.startswith("Each of 3 sizes of image gets a graph of the whole")


@pytest.mark.parametrize(
    ("mode", "inner"),
    [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs"), ("default", None)],
)
def test_modes_that_record_leave_it_to_the_whole_model(monkeypatch, mode, inner):
    recorded, asked = [], []
    monkeypatch.setattr(compile_utils, "find_compile_problems", lambda *_: iter(()))
    monkeypatch.setattr(cache, "use_cache", lambda *_: None)
    monkeypatch.setattr(cudagraph, "record_denoiser_calls", lambda model, plan: recorded.append(model))
    model = nn.Sequential(nn.Identity())
    monkeypatch.setattr(model, "parameters", lambda: iter([SimpleNamespace(device=CUDA)]))
    monkeypatch.setattr(nn.Identity, "compile", lambda self, **how: asked.append(how.get("mode")))
    with keep_torch_settings(), CompileLog() as log:
        compile_utils.compile_model(config(compile=True, compile_mode=mode).compile, model, [[model[0]]], log=log)
        assert bool(recorded) is bool(inner) and asked == [inner]
        assert config_module("inductor").fallback_random or not inner


@pytest.fixture
def kernels():
    """The choice of kernels, which is the process's, as it was before."""
    with attention.keep_attention_settings():
        yield torch.device("cpu")


def test_a_kernel_is_chosen_watched_and_refused_by_name(kernels):
    assert [attention.prefer(kernels, name) for name in ("math", "auto")] == ["MATH", ""]
    with pytest.raises(ConfigError, match=r"no cudnn on this machine; choose one of auto, flash, math"):
        attention.prefer(kernels, "cudnn")
    inputs = torch.randn(1, 2, 16, 32, requires_grad=True)
    for answers, others in (("flash", ["math"]), ("math", ["flash"])):
        attention.prefer(kernels, answers)
        with attention.AttentionRecorder(kernels) as watch, torch.autocast("cpu", torch.bfloat16):
            assert attention_of(inputs, inputs.bfloat16()).grad_fn is not None
        assert watch.others() == others and watch.why_not(others[0]) == ""
    attention.prefer(kernels)
    with attention.AttentionRecorder(kernels) as watch:
        attention_of(inputs, inputs, dropout_p=0.1)
    assert (
        watch.others() == ["flash"] and watch.why_not("flash") == "Both fused kernels do not support non-zero dropout."
    )


def attention_of(query, value, **values):
    return nn.functional.scaled_dot_product_attention(query, query, value, **values)


@pytest.mark.slow
def test_compiled_code_of_one_kernel_is_not_taken_for_that_of_another(kernels, tmp_path, monkeypatch, forget):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs, counted, hits = torch.randn(1, 1, 1, 8), torch._dynamo.utils.counters, []
    for name in ("flash", "math", "flash"):
        torch._dynamo.reset()
        attention.prefer(kernels, name)
        THREAD_SETTINGS.want(wanted_settings(config().compile, kernels))
        counted.clear()
        torch.compile(attention_of, fullgraph=True)(inputs, inputs)
        hits.append(counted["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1]
