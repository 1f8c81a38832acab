"""Trainings in processes of their own: what the page starts, what a shell starts, and several processes at once."""

import pytest
import torch

from library.config.building import build_config
from library.config.command import training_command
from library.config.formats import read_toml, to_toml
from library.families import config_class
from library.runs import reader, start
from tests import fork_server
from tests.source import ROOT
from tests.training import (
    PLAIN_CODE,
    Outcome,
    config_of,
    free_port,
    problems_and_remarks,
    ranks,
    runs_in,
    train,
    wait_for,
)

SCRIPT = "flux_train_network"
FEW = {"network_args": ("single_dim=0",)}  # an adapter less is several pieces of code less


@pytest.fixture(scope="module")
def pressed(demo, shapes, tmp_path_factory):
    """A config with three sizes of pictures, trained by pressing Train in the page, and the TOML that this wrote."""
    output = tmp_path_factory.mktemp("page") / "out put"
    config = config_of(demo, SCRIPT, train_data_dir=shapes, output_dir=output, resolution="96", output_name="m", **FEW)
    run_id = start.begin_job(start.job_of_config(config))
    folder = wait_for(lambda: (run := reader.find_run(run_id)).active or run.folder)
    while reader.find_run(run_id).active:
        wait_for(lambda: not reader.find_run(run_id).active)
    assert folder is not None
    return config, Outcome(output / "m.safetensors", reader.find_run(run_id).folder)


def test_pressing_train_gives_the_losses_of_this_process(pressed, tmp_path):
    config, page = pressed
    assert page.facts["state"] == "finished", page.facts
    toml = page.folder / "run.toml"
    again = build_config(config_class(SCRIPT), read_toml(toml), notes=[])
    assert again == config
    here = train(build_config(config_class(SCRIPT), read_toml(toml) | {"output_dir": str(tmp_path)}, notes=[]))
    assert page.losses == here.losses
    expected = here.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in page.tensors().items())
    assert "Saved" in (page.folder / "log.txt").read_text(encoding="utf-8")


def test_compiled_with_inductor_it_gives_the_same_losses(pressed, monkeypatch):
    """As a shell starts it, through `accelerate launch`; that Python itself starts it is shown by the page's run."""
    page, output = pressed[1], pressed[1].file.parent
    # A single block has a third of the pieces of code; what a double block computes is traced in compile/test_pairs.py.
    flags = ["--compile", "--compile_blocks", "single:all", "--output_name", "compiled"]
    for name, value in PLAIN_CODE.items():
        monkeypatch.setenv(name, value)
    launched = [*training_command(page.folder / "run.toml", SCRIPT), *flags]
    before = runs_in(output)
    ended = fork_server.start(launched[1:])
    said = ended.communicate()[0]
    assert ended.returncode == 0, said
    (folder,) = runs_in(output) - before
    compiled = Outcome(output / "compiled.safetensors", folder)
    told = compiled.facts["compile"]
    assert told["graphs"] == told["predicted"] == {"SingleStreamBlock": 1}
    assert told["recompiles"] == 0 and not told["fallback"]
    assert compiled.losses == pytest.approx(page.losses, rel=1e-3)
    assert compiled.facts["config"]["compile"] == {"compile": True, "compile_blocks": "single:all"}
    names = compiled.tensors().keys()
    assert names == page.tensors().keys() and not any("_orig_mod" in name for name in names)


def test_two_processes_learn_what_one_does_from_twice_the_batch(demo, squares, tmp_path):
    """With text encoders that learn, and gradients of several batches collected before the processes talk; from a state
    on, which one process has written."""
    values = {
        "train_data_dir": squares,
        "network_train_unet_only": False,
        "cache_text_encoder_outputs": False,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 4,
        "learning_rate": 1e-2,
        "save_state": True,
        "save_every_n_steps": 1,
        "sample_prompts": tmp_path / "prompts.txt",
        "sample_every_n_steps": 4,
    }
    (tmp_path / "prompts.txt").write_text("one --w 64 --h 64 --s 1 --d 1\ntwo --w 64 --h 64 --s 1 --d 2\n")
    script, output = "sdxl_train_network", tmp_path / "two"
    values |= {"output_name": "m"}
    alone = train(config_of(demo, script, output_dir=tmp_path / "one", train_batch_size=2, **values))
    values |= {"save_every_n_steps": None, "resume": tmp_path / "one" / "m-step00000001-state"}
    config = config_of(demo, script, output_dir=output, train_batch_size=1, **values)
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    for process in ranks([ROOT / "sd-scripts" / f"{script}.py", "--config_file", tmp_path / "run.toml"]):
        said = process.communicate()[0]
        assert process.returncode == 0, said
    (folder,) = runs_in(output)
    two = Outcome(output / "m.safetensors", folder)
    assert two.facts["hardware"]["processes"] == 2
    assert two.losses == pytest.approx(alone.losses[1:], rel=1e-4)
    assert list(two.numbers("grad_norm").values()) == pytest.approx(
        list(alone.numbers("grad_norm").values())[1:], rel=1e-3
    )
    assert {path.name for path in output.iterdir()} == {"m.safetensors", "m-state", "runs", "sample"}
    assert len(list((output / "sample").iterdir())) == 2
    state = {path.name for path in (output / "m-state").iterdir()}
    assert {"random_states_0.bin", "random_states_1.bin"} <= state


@pytest.mark.parametrize("what", ["FSDP", "DEEPSPEED"])
def test_what_would_cut_the_model_into_shards_is_refused(demo, monkeypatch, what):
    monkeypatch.setenv(f"ACCELERATE_USE_{what}", "true")
    (problem,) = [p for p in problems_and_remarks(config_of(demo, SCRIPT))[0] if "accelerate" in str(p)]
    assert what.lower() in str(problem).lower() and "MULTI_GPU" in str(problem)


def test_the_other_scripts_as_well(demo, squares, tmp_path):
    """FLUX.1 LoRA with a CLIP-L that learns, and a whole SDXL with both encoders. A whole FLUX.1 steps within the
    backward pass: nothing wraps the model then, so blocks can be swapped as well, and each gradient is averaged before
    its step."""
    early = {"optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False", "scale_parameter=False"]}
    early |= {"fused_backward_pass": True, "max_grad_norm": 0.01}
    cases = {
        "flux_train_network": {"network_train_unet_only": False},
        "sdxl_train": {"train_text_encoder": True, "cache_text_encoder_outputs": False, "max_grad_norm": 0.5},
        "flux_train": early,
    }
    values = {"train_data_dir": squares, "max_train_steps": 3, "learning_rate": 1e-3, "seed": 4, "output_name": "m"}
    alone, pairs = {}, []
    for name, more in cases.items():
        alone[name] = train(
            config_of(demo, name, output_dir=tmp_path / name / "one", train_batch_size=2, **values, **more)
        )
        more |= {"blocks_to_swap": 3} if name == "flux_train" else {}
        config = config_of(demo, name, output_dir=tmp_path / name / "two", train_batch_size=1, **values, **more)
        (tmp_path / f"{name}.toml").write_text(to_toml(config), encoding="utf-8")
        pairs += [name, tmp_path / f"{name}.toml", free_port()]
    for process in ranks(["-m", "tests.several_trainings", *pairs]):
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 0, said
    for name, outcome in alone.items():
        (folder,) = runs_in(tmp_path / name / "two")
        two = Outcome(tmp_path / name / "two" / "m.safetensors", folder)
        assert two.facts["hardware"]["processes"] == 2
        assert two.losses == pytest.approx(outcome.losses, rel=1e-4), name
        assert two.numbers("grad_norm") == pytest.approx(outcome.numbers("grad_norm"), rel=1e-3), name
