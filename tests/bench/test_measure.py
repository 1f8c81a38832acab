"""The bench on models that are tiny: every part is really run, and what goes wrong is a result like others."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from library import families
from library.bench import machine, measure, prepared_model, profiling, random_weights, report, subjects
from library.bench.diffusers import model as diffusers_model
from library.cli import main
from library.families.sdxl import random as sdxl_random
from library.jobs import jobs
from library.jobs.work import begin_work
from library.measuring import candidates, timing
from tests.training import FEWER

pytestmark = pytest.mark.slow  # models are run, and some compiled
CPU = torch.device("cpu")
QUICK = timing.TimingPlan(steps=1, warmup=1, seconds=5.0)
QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": [8, 4, 4],
}
VACE = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "vace_layers": [0, 1],
    "vace_in_channels": 8,
}
DYNAMO = {"compile_backend": "eager"}  # captures, and generates no code


@pytest.fixture(autouse=True)
def quick(home, monkeypatch):
    monkeypatch.setattr(timing, "RATE_SECONDS", 0.01)
    return home


def bench(subject, names, parts, compile_all=False):
    defaults = vars(subject.config({}).compile.__class__).get("__dataclass_fields__", {})
    chosen = candidates.choose_candidates(names, False, "cpu", [*defaults, *candidates.BASELINE_CHANGES])
    return measure.BenchRun(subject, CPU, chosen, parts, (64,), QUICK, compile_all, say=lambda _: None)


@pytest.fixture(scope="module")
def flux():
    return subjects.FamilySubject("flux_train_network", DYNAMO, "tiny")


def test_every_part_of_a_model_is_measured(flux, home):
    with begin_work("bench") as work:
        measurements = bench(flux, ["eager,compiled"], report.STEP_PARTS).run(work)
    rows = {(r["part"], r["candidate"]): r for r in measurements["results"]}
    assert set(rows) >= {
        ("text encoder clip_l", "eager"),
        ("text encoder t5xxl", "eager"),
        ("vae-encode", "eager"),
        ("vae-decode", "eager"),
        ("block DoubleStreamBlock", "eager"),
        ("block SingleStreamBlock", "compiled"),
        ("step", "eager"),
        ("step", "compiled"),
    }
    assert all(r["status"] == "ok" and r["flops"] and r["ms"]["p50"] > 0 for r in rows.values())
    assert rows["step", "compiled"]["compile"]["num_graphs"] == 2 and "compile" not in rows["step", "eager"]
    assert measurements["best"]["candidate"] in ("eager", "compiled") and measurements["finished"]
    job = jobs.jobs_of_kinds("bench")[0]
    assert job.state == "finished" and json.dumps(job.result, default=str) == json.dumps(measurements, default=str)


def test_flops_are_those_that_are_really_done(flux):
    config = flux.config(candidates.BASELINE_CHANGES)
    trainable = flux.make(config, CPU)
    counted = prepared_model.count_step(flux, trainable, config, 64)
    assert set(counted.blocks) == {"DoubleStreamBlock", "SingleStreamBlock"}
    with prepared_model.open_prepared(flux, config, CPU, 64, trainable) as ready, sdpa_kernel(SDPBackend.MATH):
        ready.step()
        with FlopCounterMode(display=False) as counter:
            ready.step()
    assert counted.step == counter.get_total_flops()


def test_a_step_of_the_other_family(monkeypatch):
    sizes = sdxl_random.TINY
    monkeypatch.setattr(sdxl_random, "TINY", replace(sizes, **{name: FEWER[name] for name in ("unet", "depth")}))
    subject = subjects.FamilySubject("sdxl_train_network", {}, "tiny")
    with begin_work("bench") as work:
        (row,) = bench(subject, ["eager"], ["step"]).run(work)["results"]
    assert row["status"] == "ok" and row["mfu"] > 0


@pytest.fixture
def uncounted(monkeypatch):
    """Nothing is counted, which takes a second or two for each model."""
    monkeypatch.setattr(prepared_model, "count_step", lambda *_: prepared_model.StepCost(None, {}, {}))


@pytest.mark.parametrize(
    ("name", "config"), [("QwenImageTransformer2DModel", QWEN), ("WanVACETransformer3DModel", VACE)]
)
def test_transformers_of_diffusers(name, config):
    subject = diffusers_model.DiffusersSubject(name, config, DYNAMO, {"frames": 2})
    with begin_work("bench") as work:
        rows = bench(subject, ["compiled" if name.startswith("Qwen") else "eager"], ["blocks", "step"]).run(work)[
            "results"
        ]
    assert all(row["status"] == "ok" and row["flops"] for row in rows), rows
    kinds = {row["part"] for row in rows}
    assert kinds == {"step", *(f"block {kind}" for kind in subject.block_classes)}


def test_what_cannot_be_measured_says_why_and_the_rest_goes_on(flux, monkeypatch, uncounted):
    def fails(self):
        raise torch.OutOfMemoryError("much too large")

    swapping = subjects.FamilySubject("flux_train_network", {**DYNAMO, "blocks_to_swap": 2}, "tiny")
    with begin_work("bench") as work:
        rows = bench(swapping, ["compiled+budget,checkpointing"], ["step"]).run(work)["results"]
    assert [row["status"] for row in rows] == ["skipped", "ok"]
    assert "compile_activation_budget cannot be used" in rows[0]["why"]
    monkeypatch.setattr(prepared_model.PreparedModel, "step", fails)
    with begin_work("bench") as work:
        (row,) = bench(flux, ["eager"], ["step"]).run(work)["results"]
    assert (row["status"], row["why"]) == ("failed", "out of memory")


def test_text_encoders_compiled_if_that_is_requested(flux):
    with begin_work("bench") as work:
        rows = bench(flux, ["eager"], ["encoders"], compile_all=True).run(work)["results"]
    assert [(r["part"], r["candidate"]) for r in rows[2:]] == [
        ("text encoder t5xxl", way) for way in ("eager", "compiled")
    ]
    assert rows[2]["flops"] == rows[3]["flops"]


def test_what_was_measured_before_an_interruption_is_kept(flux, monkeypatch, uncounted):
    def stopped(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepared_model.PreparedModel, "step", stopped)
    with pytest.raises(KeyboardInterrupt), begin_work("bench") as work:
        bench(flux, ["eager"], ["encoders", "step"]).run(work)
    job = jobs.job_at(work.folder)
    assert job.state == "stopped" and len(job.result["results"]) == 2 and not job.result["finished"]


def test_a_profile_of_the_processor(flux):
    eager = candidates.NAMED["eager"]
    with begin_work("profile") as work:
        summary = profiling.profile_training(flux, eager, CPU, 64, 1, work)
    assert summary["kinds"]["matrix products"] > 0.02 and summary["launches"] == 0 and summary["idle"] is None
    assert summary["verdict"][0]["rule"] == "dominant"
    assert json.loads((work.folder / profiling.TRACE).read_text(encoding="utf-8"))["traceEvents"]


def test_the_command_reads_a_config_and_prints_json(tmp_path, capsys, uncounted):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "QwenImageTransformer2DModel", **QWEN}))
    arguments = [
        "bench",
        "--config",
        str(tmp_path / "config.json"),
        "--part",
        "step",
        "--candidate",
        "eager",
        "--json",
        "--resolution",
        "64",
        "--steps",
        "1",
        "--warmup",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert main.main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["subject"]["class"] == "QwenImageTransformer2DModel" and shown["results"][0]["status"] == "ok"
    assert {"job.json", "picture.svg", "result.json", "table.txt"} <= {p.name for p in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name one thing to measure"),
        (["--family", "flux", "run.toml"], "name one thing to measure"),
        (["no.toml"], "no.toml does not exist"),
        (["--family", "flux", "--part", "wheels"], "--part wheels is not a part: choose from encoders"),
        (["--family", "flux", "--resolution", "1000"], "--resolution 1000 must be a multiple of 64"),
        (["--family", "flux", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--family", "flux", "--device", "cuda:9"], "--device cuda:9 cannot be used here"),
        (["--family", "sdxl", "--candidate", "compild"], "did you mean compiled"),
        (["--family", "sdxl", "--candidate", "cuda-graphs", "--device", "cpu"], "cuda-graphs needs a GPU"),
        (["--family", "sdxl", "--set", "lerning_rate=1"], "did you mean learning_rate"),
        (["--diffusers", "QwenImageTransformer2Model"], "needs --config FILE"),
        (["--family", "flux", "--seconds", "nan"], "--seconds must be at least 0, got nan"),
        (["--family", "flux", "--set", "=5"], "--set =5 must read NAME=VALUE"),
        (["--family", "flux", "--resolution", ","], "--resolution , names nothing"),
        (["--family", "flux", "--script", "sdxl_train"], "choose from flux_train_network, flux_train"),
        (["--family", "flux", "--profile", "--candidate", "eager,compiled"], "exactly one value of --candidate"),
        (["--family", "flux", "--input", "frames=2"], "--input is for --diffusers"),
        (["."], ". is a folder, not a file"),
    ],
)
def test_mistakes_are_reported_in_sentences(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["bench", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_class_that_is_none_and_a_config_of_another():
    with pytest.raises(diffusers_model.ConfigError, match="did you mean QwenImageTransformer2DModel"):
        diffusers_model.class_of("QwenImageTransformer2Model")
    with pytest.raises(diffusers_model.ConfigError, match="takes no num_wheels"):
        diffusers_model.class_arguments("QwenImageTransformer2DModel", {**QWEN, "num_wheels": 4})
    with pytest.raises(diffusers_model.ConfigError, match="no network called eval"):
        diffusers_model.class_of("eval")


def test_a_model_without_room_is_reported_and_nothing_measured_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(machine, "free_bytes", lambda device: 1000)
    arguments = ["bench", "--family", "flux", "--part", "step", "--candidate", "eager", "--resolution", "64"]
    assert main.main([*arguments, "--size", "tiny", "--device", "cpu"]) == 1
    assert "0 GB are free on cpu: measure --size tiny here" in capsys.readouterr().out


def test_a_model_that_only_fits_in_8_bits_is_made_on_the_host(flux, monkeypatch):
    model, half, gpu = flux.random.denoiser(), torch.bfloat16, torch.device("cuda")
    needed = random_weights.weight_bytes(model, half)
    monkeypatch.setattr(machine, "free_bytes", lambda device: needed if device == gpu else 2 * needed)
    small = flux.config({"fp8_base": True, "mixed_precision": "bf16"})
    assert random_weights.place_weights(model, gpu, half, small) == CPU
    assert random_weights.place_weights(model, gpu, half, flux.config({})) == gpu
    assert random_weights.place_weights(model, gpu, half, flux.config({"blocks_to_swap": 1})) == CPU
    monkeypatch.setattr(machine, "free_bytes", lambda device: needed - 1)
    with pytest.raises(diffusers_model.ConfigError, match="fp8_base or blocks_to_swap"):
        random_weights.place_weights(model, gpu, half, small)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("sdxl", {"denoiser": 2_567_463_684, "clip_l": 123_060_480, "clip_g": 694_659_840, "vae": 83_653_863}),
        ("flux", {"denoiser": 11_901_408_320, "clip_l": 123_060_480, "t5xxl": 4_762_310_656, "vae": 83_819_683}),
    ],
)
def test_full_size_is_the_size_of_the_published_models(family, expected):
    module = families.random_module(family)
    sizes = module.make_networks(module.FULL)
    makers = {"denoiser": sizes.denoiser, **sizes.encoders, "vae": sizes.vae}
    assert {part: sum(p.numel() for p in make().parameters()) for part, make in makers.items()} == expected
    assert makers["clip_l"]().config.hidden_size == 768


def test_weights_that_wait_on_the_host_share_memory_and_learn_alone():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
    random_weights.fill_randomly(layers, CPU, torch.float32, waits_on_host=True)
    first, other = layers[0].weight, layers[2].weight
    assert first.data_ptr() == other.data_ptr() != layers[1].weight.data_ptr()
    first.data, other.data = first.data.clone(), other.data.clone()
    with torch.no_grad():
        first.add_(1)
    assert other._version == 0, "autograd would take it for changed, too"
