"""An image of NaN is an error with its cause, in `kohya sample`, *Try it* and previews: it would be a black one."""

import pytest
import torch

from library.config.problems import ConfigError
from library.families.flux.sampler import FluxSampler
from library.families.shared.sampler import Sampler
from library.sampling import generate, plan
from tests.sampling.test_sampling import CAT, SCRIPTS, given, quiet  # noqa: F401
from tests.training import cached_squares, config_of, shallow, train  # noqa: F401


def spoiled(monkeypatch, owner, name, value, when=lambda *_: True):
    compute = getattr(owner, name)

    def spoil(self, *arguments, **options):
        result = compute(self, *arguments, **options)
        if when(*arguments):
            result[..., 0, 0] = value
        return result

    monkeypatch.setattr(owner, name, spoil)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_part_that_is_to_blame_is_named(given, script, tmp_path, monkeypatch):  # noqa: F811
    config, columns = given(script), plan.plan_columns("together", [])
    spoiled(monkeypatch, Sampler, "_decoded", torch.inf)
    with pytest.raises(ConfigError, match="the VAE gave NaN or infinity; it is damaged"):
        generate.generate(config, columns, [CAT], tmp_path / "vae", quiet)
    monkeypatch.undo()
    monkeypatch.setattr(Sampler, "images", with_nan_latents)
    with pytest.raises(ConfigError, match="the model computed NaN or infinity: lower the scale"):
        generate.generate(config, columns, [CAT], tmp_path / "model", quiet)
    assert not [*tmp_path.rglob("*.png")]


def with_nan_latents(self, requests):
    return [self._image(latents[None] * torch.nan) for latents in self.latents(*requests)]


def test_a_preview_of_nan_is_left_out_by_name_and_the_training_goes_on(shallow, cached_squares, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "p.txt").write_text("a cat --w 64 --h 64\na dog --w 64 --h 64\n", encoding="utf-8")
    spoiled(monkeypatch, FluxSampler, "latents", torch.nan, lambda request: request.prompt == "a dog")
    values = {"train_data_dir": cached_squares, "max_train_steps": 2, "sample_steps": 1, "sample_every_n_steps": 1}
    values |= {"sample_prompts": tmp_path / "p.txt", "output_dir": tmp_path / "out"}
    made = train(config_of(shallow, "flux_train_network", **values))
    assert len(made.losses) == 2 and [event["number"] for event in made.events("sample")] == [0, 0]
    said = [event["text"] for event in made.events("warning")]
    assert len(said) == 2 and all("the sample of 'a dog' is left out (the model computed NaN" in text for text in said)
