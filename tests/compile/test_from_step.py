"""`compile_from_step`: eager first, compiled from a step on, and the same again in a repeated and in a resumed run."""

import re
from itertools import pairwise

import pytest
import torch

from library import families
from library.config import building
from library.config.building import build_config, config_notes
from library.config.ineffective import ineffective_options
from library.config.problems import ConfigError
from tests.training import ONE_ADAPTER, config_of, train

# Graphs cost the time of these tests: one case has images of many sizes, the other traces a backward pass too. And the
# steps from which a resumed run continues: before a switch, where all of it is repeated; after it; and between two.
CASES = {
    "3": ("shapes", (2, 4), {"compile_backend": "eager", "compile_blocks": "single:all", "resolution": "96"}),
    "single:2, double:4": (
        "squares",
        (3,),
        {"compile_backend": "aot_eager", "compile_blocks": "double:0=eager,single:all"},
    ),
}


@pytest.mark.parametrize("begins", CASES)
def test_repeated_and_resumed_runs_are_equal_bit_for_bit(begins, shallow, request, tmp_path):
    images, resumed_from, quick = CASES[begins]
    data = request.getfixturevalue(images)

    def run(name, **values):
        options = {
            "train_data_dir": data,
            "max_train_steps": 5,
            "network_dropout": 0.2,
            "compile": True,
            "seed": 1,
            "network_args": ONE_ADAPTER,
            "compile_from_step": begins,
            "output_dir": tmp_path / name,
            **quick,
        }
        return train(config_of(shallow, "flux_train_network", **options | values))

    first = run("first", save_state=True, save_every_n_steps=1)
    steps = {int(step) for step in begins.replace(",", ":").replace(" ", "").split(":") if step.isdigit()}
    assert {event["step"] for event in first.events("compile")} == steps
    graphs = first.facts["compile"]["graphs"]
    assert graphs == first.facts["compile"]["predicted"]
    # Each kind of block counts when its step has come.
    parts = [1, 2] if "," in begins else [sum(graphs.values())]
    phases = [(event["done"], event["total"]) for event in first.events("phase") if event["name"] == "compiling"]
    assert phases == [(done, part) for before, part in pairwise([0, *parts]) for done in (before, part)]
    for step in resumed_from:
        (state,) = first.file.parent.glob(f"*{step:08d}-state")
        resumed = run(f"from{step}", resume=state)
        assert resumed.losses == first.losses[step:]
        pairs = zip(resumed.tensors().values(), first.tensors().values(), strict=True)
        assert all(torch.equal(left, other) for left, other in pairs)
        late = {s for s in steps if s > step + 1}
        assert {event["step"] for event in resumed.events("compile")} == late | ({step} if late != steps else set())


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"compile_from_step": "soon"},
            "'soon' is not a step; write 40, or a kind of block and its step, such as double",
        ),
        ({"compile_from_step": "middle:4"}, "'middle:4' is not a step"),
        ({"compile_from_step": ","}, "',' names no step; write 40, or nothing to compile from the beginning"),
        ({"compile_from_step": "4", "compile_compare_steps": 5}, "both say when compiling begins"),
        (
            {"compile_from_step": "transformer:4", "compile_scope": "model"},
            "no kinds to tell apart: write one step",
        ),
        ({"compile_from_step": "transformer:4, single:5"}, "'single:5' is a second step for the same blocks"),
    ],
)
def test_a_value_that_names_no_step_is_reported(values, told):
    with pytest.raises(ConfigError, match=told):
        build_config(families.config_class("flux_train_network"), {"compile": True, **values})


def test_transformer_means_all_kinds_of_transformer_blocks():
    values = {"compile": True, "compile_from_step": "transformer:4"}
    chosen = build_config(families.config_class("flux_train_network"), values, notes=[]).compile.first_steps()
    assert chosen == {"DoubleStreamBlock": 4, "SingleStreamBlock": 4}


@pytest.mark.parametrize("given", ["40, 50", "transformer:20, resnet:30, transformer:30"])
def test_two_steps_for_the_same_blocks_are_refused(given):
    with pytest.raises(ConfigError, match="compile_from_step: .* is a second step for the same blocks"):
        build_config(
            families.config_class("sdxl_train_network"), {"compile": True, "compile_from_step": given}, notes=[]
        )


@pytest.mark.parametrize(
    ("begins", "told"),
    [
        (
            "101",
            "nothing is compiled, as the training ends with step 100 and compiling begins with step 101; use 100 at",
        ),
        ("transformer:200, resnet:300", "nothing is compiled, .* begins with step 200"),
        ("transformer:100, resnet:101", "resnet blocks are not compiled, .* their compiling begins with step 101"),
        ("transformer:20, 101", "other blocks are not compiled"),
        ("transformer:101", "transformer blocks are not"),
        ("100", ""),
        ("transformer:100", ""),
    ],
)
def test_a_step_after_the_end_of_the_training_is_reported(begins, told):
    values = {"compile": True, "max_train_steps": 100, "compile_from_step": begins}
    config = build_config(families.config_class("sdxl_train_network"), values, notes=[])
    notes = [note for note in config_notes(config) if note.option == "compile_from_step"]
    assert "compile_from_step" not in ineffective_options(config)  # no field of a form is grey for it
    assert re.search(told, *map(str, notes)) if told else not notes
    by_epochs = building.replace_options(config, max_train_epochs=3)
    assert not any(
        note.option == "compile_from_step" for note in config_notes(by_epochs)
    )  # its steps have yet to be counted


@pytest.mark.parametrize(
    ("begins", "told"), [("single:4, double:2", ["double"]), ("transformer:4", []), ("40", []), ("single:4", [])]
)
def test_a_step_for_blocks_that_are_not_compiled_is_reported(begins, told):
    values = {"compile": True, "compile_blocks": "single:all", "compile_from_step": begins}
    config = build_config(families.config_class("flux_train_network"), values, notes=[])
    notes = [note for note in config_notes(config) if note.option == "compile_from_step"]
    assert [str(note).partition(" has no effect here, as compile_blocks")[0] for note in notes] == [
        f"compile_from_step: {word}" for word in told
    ]
