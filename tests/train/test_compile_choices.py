"""Trainings that compile some blocks, or later: the same numbers, the predicted graphs, and an honest account."""

import pytest

from library import families
from library.config.building import build_config
from library.config.problems import ConfigError
from tests.training import FEW, SCRIPTS, config_of, runs_in, train

COMPILED = {"compile": True, "compile_backend": "eager"}  # which blocks, and when, is decided before any backend


@pytest.fixture
def run(demo, shapes, tmp_path):
    """Train on three sizes, each time into a folder of its own."""
    count = iter(range(100))

    def start(script, **values):
        folder = {"resolution": "96", "output_dir": tmp_path / f"run{next(count)}"}
        return train(config_of(demo, script, train_data_dir=shapes, **folder, **values))

    return start


def log_of(outcome):
    return (outcome.folder / "log.txt").read_text(encoding="utf-8")


def test_eager_steps_first_tell_what_compiling_saves(run):
    script = "flux_train_network"
    some = FEW[script]  # each kind costs a graph
    eager = run(script, max_train_steps=6)
    compared = run(script, max_train_steps=6, compile_compare_steps=3, compile_blocks=some, **COMPILED)
    assert compared.losses == pytest.approx(eager.losses, rel=1e-3)
    told = compared.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0
    assert {event["step"] for event in compared.events("compile")} == {3}  # right after the last eager one
    assert told["eager_s_it"] > 0 and told["compiled_s_it"] > 0 and "saved_seconds" in told
    steps = compared.numbers("compile/seconds")
    assert steps[3] == 0 < steps[6] == pytest.approx(told["seconds"], abs=0.01)
    assert compared.events("compile")[-1]["total"] == pytest.approx(told["seconds"], abs=0.01)
    assert "Compiling took" in log_of(compared) and "a step instead of" in log_of(compared)


def test_without_a_comparison_seconds_are_reported_but_no_savings(run):
    compiled = run("flux_train_network", max_train_steps=2, compile_blocks="single:all", **COMPILED)
    assert "saved_seconds" not in compiled.facts["compile"] and "eager_s_it" not in compiled.facts["compile"]
    assert "Compiling took" in log_of(compiled) and "saved" not in log_of(compiled).rpartition("Compiling took")[2]


@pytest.mark.parametrize(
    ("demo", "script", "chosen", "graphs"),
    [
        ("deep", "flux_train_network", "single:all,double:1", {"SingleStreamBlock": 1, "DoubleStreamBlock": 1}),
        ("shallow", "sdxl_train", "resnet:0-1,3", {"ResnetBlock2D": None}),
    ],
    indirect=["demo"],
)
def test_chosen_blocks_alone_are_compiled(run, script, chosen, graphs):
    eager = run(script, max_train_steps=3)
    compiled = run(script, max_train_steps=3, compile_blocks=chosen, gradient_checkpointing=True, **COMPILED)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0
    assert set(told["graphs"]) == set(graphs)
    assert all(told["graphs"][kind] == count for kind, count in graphs.items() if count)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-3)
    if chosen == "resnet:0-1,3":
        assert told["blocks"] == {"ResnetBlock2D": 3}


def test_a_block_that_the_model_does_not_have_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match=r"double:99; the last is double:\d") as refused:
        run("flux_train_network", compile_blocks="double:0-99", **COMPILED)
    assert len(str(refused.value).splitlines()) == 1
    assert not runs_in(tmp_path / "run0")  # found in the file's header: nothing has begun


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_names_and_ranges_of_blocks_are_one_sentence(script):
    config = families.config_class(script)
    names = list(config().compile.kinds)
    assert tuple(config().compile.kinds.values()) == families.family_for(config()).block_classes
    for wrong in ("dubble:0-9", "0-9", f"{names[0]}:9-0", f"{names[0]}:some", f"{names[0]}:", names[0]):
        with pytest.raises(ConfigError, match="compile_blocks") as refused:
            build_config(config, {"compile_blocks": wrong})
        assert len(str(refused.value).splitlines()) == 1
    kinds, others = config().compile.kinds, names[1:]
    said = ",".join([f" {names[0]}:0-3, 7", *(f"{name}:all" for name in others)])
    chosen = build_config(config, {"compile_blocks": f"{said} "}).compile.ranges()
    assert chosen == {kinds[names[0]]: ((0, 3), (7, 7)), **{kinds[name]: None for name in others}}
