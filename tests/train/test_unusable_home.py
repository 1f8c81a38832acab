"""A data folder of the user that cannot be written to: the training says so, and runs."""

from library.cli.check import main as check
from library.config.formats import to_toml
from tests.training import config_of, short_captions, train  # noqa: F401


def test_a_training_runs_and_says_what_the_page_will_miss(demo, squares, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "file" / "home"))
    options = {"train_data_dir": squares, "output_name": "m", "max_train_steps": 2}
    done = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "out", **options))
    assert done.facts["state"] == "finished" and len(done.losses) == 2
    (told,) = [event["text"] for event in done.events("warning") if "KOHYA_HOME" in event["text"]]
    assert f"{tmp_path / 'file' / 'home' / 'runs'} cannot be written to" in told
    config = config_of(demo, "flux_train_network", output_dir=tmp_path / "new", **options)
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    check(["flux_train_network", str(tmp_path / "c.toml")])
    assert "KOHYA_HOME" in capsys.readouterr().out
