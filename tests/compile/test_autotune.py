"""The fastest way is found by trying, remembered, and changes no number of the training that follows."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from library.config.building import replace_options
from library.config.problems import ConfigError
from library.measuring import stored_results
from library.measuring.candidates import TUNED_OPTIONS, format_changes
from library.measuring.result import Measured
from library.train.choices import Choices
from library.train.compiling import autotune, fingerprint
from library.train.compiling.autotune import Tuner, fastest_setting
from tests.training import ONE_ADAPTER, config_of, train

ASKED = {
    "gradient_checkpointing": True,
    "blocks_to_swap": 2,
    "compile_backend": "eager",
    "network_dropout": 0.1,
    "compile_blocks": "single:all",
    "network_args": ONE_ADAPTER,
}
SPEEDS = {
    "compile": 0.5,
    "attention_kernel": 0.8,
    "checkpoint_keep_attention": 0.7,
    "compile_dynamic": 1.2,
    "blocks_to_swap": 0.9,
}


@pytest.fixture
def tuned(demo, shapes, tmp_path, monkeypatch):  # noqa: F811
    """Train with ways whose speeds are made up; everything else about trying them is real."""
    monkeypatch.setattr(stored_results, "results_folder", lambda: tmp_path / "tuning")
    seen, count = [], iter(range(100))
    real = Tuner.time_candidate

    def timed(tuner, compute_loss, result):
        real(tuner, compute_loss, result)
        seen.append(result.changes)
        factors = [factor for name, factor in SPEEDS.items() if result.changes.get(name)]
        result.seconds = torch.tensor([100.0, *factors]).prod().item()
        result.compiling = 5.0 if result.changes["compile"] else 0.0

    monkeypatch.setattr(Tuner, "time_candidate", timed)
    monkeypatch.setattr(autotune, "TIMED", 1)
    monkeypatch.setattr(autotune, "MAX_TIMED_SIZES", 1)

    def start(**values):
        options = {"resolution": "96", "max_train_steps": 3, "output_dir": tmp_path / f"run{next(count)}"}
        return train(config_of(demo, "flux_train_network", train_data_dir=shapes, **options | ASKED | values))

    return start, seen


def test_the_winner_is_kept_remembered_and_changes_no_number(tuned, tmp_path):
    start, seen = tuned
    outcome = start(compile_autotune=True)
    (told,) = outcome.events("tuned")
    winner = {"compile": True, "attention_kernel": "math", "checkpoint_keep_attention": True, "blocks_to_swap": 1}
    assert told["chosen"] == winner and not told["remembered"]
    assert seen[:2] == [{"compile": False}, {"compile": True}]
    assert {"compile": True, "attention_kernel": "math", "compile_dynamic": "false"} in seen
    assert {"compile": True, "attention_kernel": "flash"} not in seen  # that kernel is chosen anyway
    plain = start(**winner, max_train_steps=4, save_every_n_steps=3)  # a step more, for what is resumed below
    assert outcome.losses == plain.losses[:3]
    tensors = load_file(plain.file.with_stem(f"{plain.file.stem}-step00000003"))
    assert all(torch.equal(a, b) for a, b in zip(outcome.tensors().values(), tensors.values(), strict=True))
    assert outcome.facts["compile"]["graphs"] == plain.facts["compile"]["graphs"]
    assert {event["step"] for event in outcome.events("compile")} == {0}
    log = (outcome.folder / "log.txt").read_text(encoding="utf-8")
    assert "the fastest is compile = true, attention_kernel = math" in log and "with the next best, compiled" in log
    assert all(f"  {format_changes(way)}: " in log for way in seen)
    assert outcome.facts["compile"]["attention"] == "MATH"

    assert set().union(*seen) <= set(TUNED_OPTIONS)
    number = len(seen)
    again = start(compile_autotune=True, save_state_on_train_end=True, output_dir=tmp_path / "again")
    assert len(seen) == number and again.losses == outcome.losses
    assert again.events("tuned")[0]["remembered"] and again.events("tuned")[0]["chosen"] == winner
    (file,) = (tmp_path / "tuning").iterdir()
    assert len(json.loads(file.read_text(encoding="utf-8"))["results"]) == number
    file.write_text("torn", encoding="utf-8")
    assert autotune.read_results(file.stem, 3) == []

    # What was chosen belongs to the state: it holds where nothing is remembered, and nothing is tried again.
    file.unlink()
    (state,) = (tmp_path / "again").glob("*-state")
    resumed = start(compile_autotune=True, max_train_steps=4, resume=state)
    assert len(seen) == number and not list((tmp_path / "tuning").iterdir())
    log = (resumed.folder / "log.txt").read_text(encoding="utf-8")
    assert "attention_kernel = math" in log and "as in the run that is continued" in log
    assert resumed.facts["compile"]["graphs"] == plain.facts["compile"]["graphs"]
    assert resumed.numbers()[4] == plain.numbers()[4]


@pytest.mark.parametrize(
    "tuned", [{"output_dir": "/elsewhere"}, {"compile": True, "seed": 3}, ["compile"], "compile", None]
)
def test_a_state_from_elsewhere_changes_no_other_options(tuned):
    assert Choices.read({"choices": {"tuned": tuned, "compiled_from": "4", "stays_eager": -1}}) == Choices()
    assert Choices.read({"choices": [tuned]}) == Choices.read({}) == Choices()
    assert Choices.read({"choices": {"tuned": {"compile": False}, "compiled_from": 7}}) == Choices(
        {"compile": False}, 7
    )


def test_compiling_is_not_kept_where_it_loses():
    eager, compiled = (
        Measured({"compile": False}, seconds=1.0),
        Measured({"compile": True}, seconds=0.8, compiling=30.0),
    )
    assert fastest_setting([eager, compiled], passes=100) is eager  # 100 s against 110 s
    assert fastest_setting([eager, compiled], passes=1000) is compiled
    slower = Measured({"compile": True}, seconds=1.1)
    assert fastest_setting([eager, slower], passes=10**6) is eager
    same = Measured({"compile": True}, seconds=0.999)
    assert fastest_setting([eager, same], passes=10**6) is eager
    big = Measured({"compile": True}, seconds=0.1, why="not enough memory")
    assert fastest_setting([eager, big], passes=10**6) is eager
    assert fastest_setting([big], passes=10).changes == {}


def test_a_short_training_does_not_try_to_compile(tuned, monkeypatch, tmp_path):
    start, seen = tuned
    real = Tuner.time_candidate

    def quick(tuner, compute_loss, result):
        real(tuner, compute_loss, result)
        result.seconds = 0.1

    monkeypatch.setattr(Tuner, "time_candidate", quick)
    (told,) = start(compile_autotune=True).events("tuned")
    assert seen == [{"compile": False}] and told["chosen"] == {"compile": False}
    assert "compiling would take longer than it saves" in told["text"] and not (tmp_path / "tuning").exists()


def test_what_a_short_training_left_out_is_measured_by_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_results, "results_folder", lambda: tmp_path)
    stored_runs = [{"changes": {"compile": True}, "seconds": 1.0}]
    facts = {"version": autotune.VERSION, "passes": 100, "complete": False, "results": stored_runs}
    stored_results.store_result("a", facts)
    assert autotune.read_results("a", 100) == stored_runs and autotune.read_results("a", 101) == []
    stored_results.store_result("a", facts | {"complete": True})
    assert autotune.read_results("a", 10**6) == stored_runs


def test_what_is_remembered_is_found_by_all_that_matters_and_by_nothing_else(demo, shapes, monkeypatch):  # noqa: F811
    config = config_of(demo, "flux_train_network", train_data_dir=shapes, **ASKED, compile_autotune=True)
    denoiser = torch.nn.Linear(4, 4)

    def name(kinds=None, ranks=1, model=denoiser, **values):
        named_family = SimpleNamespace(
            family=SimpleNamespace(name="flux"),
            components=SimpleNamespace(denoiser=model, encoders={}),
            method=SimpleNamespace(trained_parts={}),
        )
        return Tuner.fingerprint(
            SimpleNamespace(
                config=replace_options(config, **values),
                compute_loss=named_family,
                world=SimpleNamespace(device=torch.device("cpu"), ranks=ranks),
                batches=SimpleNamespace(kinds=lambda: Counter(kinds or {(1, 8, 8): 100, (1, 8, 12): 50})),
            )
        )

    usual = name()
    other = [
        {"t5xxl_max_token_length": 64},
        {"apply_t5_attn_mask": True},
        {"blocks_to_swap": 1},
        {"network_dim": 2},
        {"attention_kernel": "math"},
        {"mixed_precision": "bf16"},
        {"compile_scope": "inner"},
        {"ranks": 2},
        {"kinds": {(2, 8, 8): 100, (1, 8, 12): 50}},
        {"kinds": {(1, 8, 8): 50, (1, 8, 12): 50}},
        {"model": torch.nn.Linear(4, 8)},
        {"network_dropout": 0.2},
    ]
    same = [
        {"seed": 5},
        {"output_name": "x"},
        {"learning_rate": 1e-3},
        {"max_train_steps": 9},
        {"training_comment": "x"},
        {"network_alpha": 3},
        {"compile_fallback": True},
        {"kinds": {(1, 8, 8): 101, (1, 8, 12): 50}},
        {"compile_cache_dir": "x"},
        {"gradient_accumulation_steps": 2},
    ]
    assert usual not in [name(**changes) for changes in other] and {name(**changes) for changes in same} == {usual}
    monkeypatch.setattr(fingerprint, "installed_version", lambda package: "9")
    assert name() != usual


def test_that_compiling_failed_is_not_remembered(tuned, monkeypatch, tmp_path):
    start, _ = tuned
    real = Tuner.time_candidate

    def fails(tuner, compute_loss, result):
        if result.changes["compile"]:
            raise ConfigError("compile: no C++ compiler was found")
        real(tuner, compute_loss, result)

    monkeypatch.setattr(Tuner, "time_candidate", fails)
    event = start(compile_autotune=True, max_train_steps=1).events("tuned")[0]
    assert event["chosen"] == {"compile": False} and "no C++ compiler" in event["results"][1]["why"]
    assert not (tmp_path / "tuning").exists()
