"""Killed at 30 random moments during caching, saves and states: nothing is torn, and the result is the same."""

import json
import os

import pytest

from library.config.formats import to_toml
from library.families.flux import random
from tests import fork_server
from tests.training import config_of, pictures

KILLS = 30
OWN = {"save_state": True, "save_every_n_steps": 1, "save_last_n_steps": 2, "save_every_n_epochs": 1}
BY_TIME = {"save_state_every_n_minutes": 1e-9, "save_state_on_train_end": True}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every life is a fork")
@pytest.mark.parametrize(
    "kills, how, seen",
    [(KILLS, OWN, ("_flux.", "_flux_te.", "m-step", "-state")), (10, BY_TIME, ("m-backup-step",))],
    ids=["of all files", "of states by time"],
)
def test_a_training_survives_30_deaths(demo, tmp_path, kills, how, seen):
    small = random.FluxSizes(double_blocks=1, single_blocks=1, clip_layers=1, t5_layers=1)
    model = random.write_random_model(tmp_path / "models", sizes=small)
    models = {name: model[name] for name in ("clip_l", "t5xxl", "ae")} | {
        "pretrained_model_name_or_path": model["flux"]
    }
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=pictures(tmp_path / "images", ((64, 64),) * 6, repeats=1),
        output_dir=tmp_path / "out",
        output_name="m",
        max_train_steps=6,
        cache_latents_to_disk=True,
        cache_text_encoder_outputs_to_disk=True,
        text_encoder_batch_size=1,
        network_dim=4,
        network_alpha=4,
        max_data_loader_n_workers=0,
        **models,
        **how,
    )
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    arguments = ["-m", "tests.killed_training", str(tmp_path / "run.toml"), str(tmp_path / "lives"), str(kills), "1"]
    program = fork_server.start(arguments)
    said = program.communicate()[0]
    assert program.returncode == 0, said
    event = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert len(event["deaths"]) == kills and event["finished"] >= 1
    for what in seen:
        assert any(what in death for death in event["deaths"]), (what, event["deaths"])
