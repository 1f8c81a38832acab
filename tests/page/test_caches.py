"""Caching a data set from the form: its progress, stopping it, and refusing what the page may not read."""

import json
import sys

import pytest

from kohya_gui.form.caches import CACHING_KIND, CacheApi
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.server.json_api import ApiRequest
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.jobs import jobs

# `kohya cache` that finds four of twelve images encoded, and waits for its end.
STUB = """
import time
from library.jobs.work import join_work

with join_work("cache") as work:
    while True:
        work.phase("caching latents", 4, 12)
        time.sleep(0.05)
"""


@pytest.fixture
def stub(monkeypatch):
    commands = []
    monkeypatch.setattr(jobs, "job_command", lambda words: commands.append([*words]) or [sys.executable, "-c", STUB])
    return commands


@pytest.mark.browser
def test_a_cache_is_made_from_the_form_with_progress_and_stop(visit, stub, tmp_path):
    visitor = visit()
    visitor.fill(pretrained_model_name_or_path=tmp_path, train_data_dir=tmp_path, resolution="512")
    visitor.click("Caching")
    box = visitor.page.locator("#lora-section-cache .field:has([data-option=cache_latents_to_disk])")
    box.get_by_role("button", name="Make this cache now").click()
    visitor.until("Cache of images").until("caching latents 4 / 12")
    assert visitor.page.locator(".job .track").get_attribute("aria-valuetext") == "caching latents 4 / 12"
    box.get_by_role("button", name="Make this cache now").click()
    visitor.until("Cache of images is still running")
    visitor.page.locator(".message:visible .away").click()
    (job,) = jobs.jobs_of_kinds(CACHING_KIND)
    jobs.stop_job(job)
    ((command, kind, toml, *launch),) = stub
    assert (command, kind, launch) == ("cache", "latents", ["--num_processes=1"])
    held = read_toml(toml)
    assert held["cache_latents_to_disk"] and "cache_text_encoder_outputs" not in held
    assert "sdxl_train_network" in toml and jobs.find_job(job.id).folder.as_posix() in toml.replace("\\", "/")


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"kind": "latents"}, "train_data_dir"),
        ({"kind": "latents", "data": "/etc"}, "outside"),
        ({"kind": "compiled"}, "no such choice"),
        ({"kind": "text", "tab": "../x"}, "no such choice"),
        ({"kind": "text", "sent": "[]"}, "not what the form sends"),
    ],
)
def test_nothing_is_started_where_it_cannot_be_made(stub, monkeypatch, tmp_path, fields, why):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    api = CacheApi({"lora": SettingsForm("lora", FAMILY_TITLES, TABS[0].configs, TABS[0].basics)}, [tmp_path])
    values = {"pretrained_model_name_or_path": str(tmp_path), "train_data_dir": fields.pop("data", "")}
    sent = json.dumps({"family": "sdxl", "values": values, "launch": {}})
    with pytest.raises(ConfigError, match=why):
        api.begin(ApiRequest({"tab": "lora", "sent": sent, **fields}))
    assert not stub and not jobs.jobs_of_kinds(CACHING_KIND)
