"""A state whose checksums fit and whose contents do not ends in one sentence, whichever part of it is forged."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.config.problems import ConfigError
from library.train.saving import resume_check, state_files
from tests.training import cached, config_of, pictures, short_captions, train  # noqa: F401

SCRIPT = "flux_train_network"
OPTIMIZER, SCHEDULER, RANDOM = "optimizer.bin", "scheduler.bin", "random_states_0.bin"
WEIGHTS, AVERAGE, FACTS = "model.safetensors", "ema.safetensors", "train_state.json"


@pytest.fixture(scope="module")
def began(demo, tmp_path_factory):
    """The state of a training with an average and held-out images, and the config that continues it."""
    few = cached(pictures(tmp_path_factory.mktemp("few"), ((64, 64),) * 2, repeats=1))
    out = tmp_path_factory.mktemp("out")
    how = {"train_data_dir": few, "output_dir": out, "output_name": "m", "ema_decay": 0.9}
    how |= {"lr_scheduler": "constant_with_warmup", "network_dropout": 0.1}
    train(config_of(demo, SCRIPT, **how, max_train_steps=2, save_state=True))
    return out / "m-state", lambda state, **more: config_of(
        demo, SCRIPT, **{**how, "max_train_steps": 3, "resume": state, **more}
    )


@pytest.fixture(scope="module")
def in_parts(demo, tmp_path_factory):
    """The same of a fine-tune whose optimizer steps the model in parts."""
    few = cached(pictures(tmp_path_factory.mktemp("few"), ((64, 64),) * 2, repeats=1))
    out = tmp_path_factory.mktemp("out")
    how = {"train_data_dir": few, "output_dir": out, "output_name": "m", "blockwise_fused_optimizers": True}
    train(config_of(demo, "flux_train", **how, max_train_steps=1, save_state=True))
    return out / "m-state", lambda state, **more: config_of(
        demo, "flux_train", **{**how, "max_train_steps": 2, "resume": state, **more}
    )


def put(value, path, new):
    """Set what a path of keys and numbers leads to; ... removes it."""
    *first, last = path
    for key in first:
        value = value[key]
    if new is ...:
        del value[last]
    else:
        value[last] = new(value[last]) if callable(new) else new


def forge(state, name, *changes):
    """Change a file of a state, and write its checksum anew."""
    file = state / name
    if name.endswith(".json"):
        facts = json.loads(file.read_text())
        for path, new in changes:
            put(facts, path, new)
        file.write_text(json.dumps(facts))
    elif name.endswith(".safetensors"):
        tensors = load_file(file)
        for path, new in changes:
            put(tensors, [path[0] or sorted(tensors)[0]], new)
        save_file(tensors, file, {state_files.STEP_KEY: "2"})
    else:
        values = torch.load(file, weights_only=True)
        for path, new in changes:
            if not path:
                values = new
            else:
                put(values, path, new)
        torch.save(values, file)
    digests = state_files._digests(state, sorted(path.name for path in state.iterdir() if path.name != "SHA256SUMS"))
    text = "".join([f"# {state_files.STEP_KEY} 2\n", *(f"{digest}  {one}\n" for one, digest in digests.items())])
    (state / state_files.SUMS).write_text(text + state_files._last_line(text), newline="\n")


MOMENT = ("state", 0, "exp_avg")
HUGE = 10**30
FORGED = [
    (FACTS, [(["current_step"], "two")]),
    (FACTS, [(["current_step"], -1)]),
    (FACTS, [(["current_step"], HUGE)]),
    (FACTS, [(["current_step"], 1.5)]),
    (FACTS, [(["current_step"], ...)]),
    (FACTS, [(["current_epoch"], None)]),
    (FACTS, [(["current_epoch"], HUGE)]),
    (FACTS, [(["seed"], "x")]),
    (FACTS, [(["seed"], ...)]),
    (FACTS, [(["losses"], {"a": 1})]),
    (FACTS, [(["losses"], ["x"])]),
    (FACTS, [(["batches"], [])]),
    (FACTS, [(["batches", "index"], -5)]),
    (FACTS, [(["batches", "index"], "x")]),
    (FACTS, [(["batches", "epoch"], ...)]),
    (FACTS, [(["batches", "seed"], [1])]),
    (FACTS, [(["settings"], "x")]),
    (FACTS, [(["settings", "optimizer_args"], 5)]),
    (FACTS, [(["settings", "network_dim"], {"a": 1})]),
    (FACTS, [(["computed_by"], [])]),
    (FACTS, [(["groups"], {"kinds": [], "groups": [3]})]),
    (FACTS, [(["groups"], "x")]),
    (FACTS, [(["alphas"], {"a": "x"})]),
    (FACTS, [(["alphas"], [])]),
    (FACTS, [(["early_stop"], {"best_loss": 1.0})]),
    (FACTS, [(["early_stop"], {"best_loss": "x", "best_step": 1, "waited": 0, "last_step": 1})]),
    (OPTIMIZER, [((), [1, 2])]),
    (OPTIMIZER, [((), torch.zeros(3))]),
    (OPTIMIZER, [(["state"], ...)]),
    (OPTIMIZER, [(["state"], 5)]),
    (OPTIMIZER, [(["param_groups"], ...)]),
    (OPTIMIZER, [(["param_groups"], [])]),
    (OPTIMIZER, [(["param_groups", 0, "lr"], ...)]),
    (OPTIMIZER, [(["param_groups", 0, "lr"], "fast")]),
    (OPTIMIZER, [(["param_groups", 0, "lr"], math.nan)]),
    (OPTIMIZER, [(["param_groups", 0, "lr"], 1e300)]),
    (OPTIMIZER, [(["param_groups", 0, "betas"], 0.9)]),
    (OPTIMIZER, [(["param_groups", 0, "betas"], (0.9,))]),
    (OPTIMIZER, [(["param_groups", 0, "params"], [0])]),
    (OPTIMIZER, [(["param_groups", 0, "params"], ...)]),
    (OPTIMIZER, [(MOMENT, ...)]),
    (OPTIMIZER, [(MOMENT, "x")]),
    (OPTIMIZER, [(MOMENT, torch.zeros(3, 5, 7))]),
    (OPTIMIZER, [(MOMENT, torch.zeros(()))]),
    (OPTIMIZER, [(("state", 0, "step"), "x")]),
    (OPTIMIZER, [(("state", 0), [1])]),
    (SCHEDULER, [((), 5)]),
    (SCHEDULER, [(["last_epoch"], "x")]),
    (SCHEDULER, [(["last_epoch"], HUGE)]),
    (SCHEDULER, [(["base_lrs"], [])]),
    (SCHEDULER, [(["base_lrs"], ["x"])]),
    (SCHEDULER, [(["_last_lr"], "x")]),
    (SCHEDULER, [(["_step_count"], {})]),
    (RANDOM, [((), 5)]),
    (RANDOM, [(["python"], ...)]),
    (RANDOM, [(["python"], [3, [1, 2], None])]),
    (RANDOM, [(["python"], lambda value: [value[0], [2**80, *value[1][1:]], None])]),
    (RANDOM, [(["torch"], torch.zeros(4))]),
    (RANDOM, [(["torch"], "x")]),
    (RANDOM, [(["torch"], ...)]),
    (WEIGHTS, [([""], torch.zeros(3, 5))]),
    (WEIGHTS, [([""], ...)]),
    (WEIGHTS, [(["more.weight"], torch.zeros(2))]),
    (AVERAGE, [([""], torch.zeros(3, 5))]),
    (AVERAGE, [([""], ...)]),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FORGED)))
def test_a_forged_part_ends_in_one_sentence(began, tmp_path, number):
    name, changes = FORGED[number]
    state = shutil.copytree(began[0], tmp_path / "m-state")
    forge(state, name, *changes)
    config = began[1](state, output_dir=tmp_path / "out")
    resume_check.problems(state, config)  # the check of the page, which loads nothing
    resume_check.changes(config)
    with pytest.raises(ConfigError) as refused:
        train(config)
    (problem,) = refused.value.problems
    assert "resume" in str(problem) and "\n" not in str(problem)


BUNDLE = ("bundles", 0)
FORGED_PARTS = [
    [(["bundles"], [])],
    [(["bundles"], 5)],
    [(["steps"], "x")],
    [(["groups"], [])],
    [(["groups", 0, "lr"], ...)],
    [((*BUNDLE, "param_groups"), ...)],
    [((*BUNDLE, "param_groups", 0, "betas"), "x")],
    [((*BUNDLE, *MOMENT), torch.zeros(3, 5, 7))],
    [((*BUNDLE, *MOMENT), ...)],
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", FORGED_PARTS, ids=str)
def test_a_forged_optimizer_of_several_parts_ends_in_one_sentence(in_parts, tmp_path, changes):
    state = shutil.copytree(in_parts[0], tmp_path / "m-state")
    forge(state, OPTIMIZER, *changes)
    with pytest.raises(ConfigError, match="^resume") as refused:
        train(in_parts[1](state, output_dir=tmp_path / "out"))
    assert len(refused.value.problems) == 1 and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_state_that_is_only_written_anew_is_resumed(began, tmp_path):
    state = shutil.copytree(began[0], tmp_path / "m-state")
    for name in (FACTS, OPTIMIZER, SCHEDULER, RANDOM, WEIGHTS, AVERAGE):
        forge(state, name)
    assert len(train(began[1](state, output_dir=tmp_path / "out")).losses) == 1
