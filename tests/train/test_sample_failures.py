"""Whatever fails while samples are generated, the training continues and learns the same."""

import errno

import pytest
import torch
from PIL import Image

from library.families.flux.sampler import FluxSampler
from library.families.shared.sampler import Sampler
from library.sampling.engine import ImageEngine
from library.train.evaluation import samples
from library.train.journal import Journal
from tests.training import config_of, train

SCRIPT = "flux_train_network"
FULL = OSError(errno.ENOSPC, "No space left on device")
# What fails: a part of generating, keeping or reporting samples, with its error.
FAILING = [
    (FluxSampler, "encode", KeyError("a token")),
    (FluxSampler, "is_guided", RuntimeError("broken")),
    (Sampler, "batch_key", ZeroDivisionError()),
    (Sampler, "vae_on", RuntimeError("broken")),
    (Sampler, "images", MemoryError()),
    (Sampler, "decoded", RecursionError()),
    (ImageEngine, "_decide", TypeError("broken")),
    (ImageEngine, "_enter", torch.OutOfMemoryError("broken")),
    (ImageEngine, "_note_graphs", RuntimeError("broken")),
    (Image.Image, "save", FULL),
    (Journal, "sampled", FULL),
    (Journal, "previewed", FULL),
]


@pytest.fixture
def values(squares, tmp_path):
    (tmp_path / "p.txt").write_text("a --w 64 --h 64 --d 1\nb is longer --w 64 --h 64\n", encoding="utf-8")
    sampling = {"sample_prompts": tmp_path / "p.txt", "sample_every_n_steps": 1, "sample_at_first": True}
    return {"train_data_dir": squares, "max_train_steps": 2, "seed": 5, "sample_steps": 1, **sampling}


@pytest.fixture(scope="module")
def plain(demo, squares, tmp_path_factory):
    values = {"train_data_dir": squares, "max_train_steps": 2, "seed": 5}
    return train(config_of(demo, SCRIPT, output_dir=tmp_path_factory.mktemp("plain"), **values))


@pytest.mark.parametrize(("owner", "name", "error"), FAILING)
def test_the_training_is_that_without_samples(demo, values, plain, tmp_path, monkeypatch, owner, name, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(owner, name, fail)
    made = train(config_of(demo, SCRIPT, output_dir=tmp_path / "out", sample_batch_size=2, **values))
    assert made.losses == plain.losses and len(made.losses) == 2
    tensors = made.tensors()
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in plain.tensors().items())
    said = [event["text"] for event in made.events("warning")]
    assert said and all(text.endswith(("the training continues", "tried again when samples are due")) for text in said)


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        (["a cat"], "the sample of 'a cat' is left out (why)"),
        (["a cat", "a cat"], "the sample of 'a cat' is left out (why)"),
        (["a cat", "a dog", ""], "the samples of 'a cat' and 2 more are left out (why)"),
        (["猫" * 90], f"the sample of '{'猫' * 59}…' is left out (why)"),
        (["a cat", None], "the samples of this step are left out (why)"),
    ],
)
def test_a_warning_names_the_prompts_that_failed(failed, says):
    assert str(samples.left_out(failed, "why")) == f"sample_prompts: {says}; the training continues"


def test_only_the_prompt_that_fails_is_named(demo, values, tmp_path, monkeypatch):
    keep = samples.SampleRunner._keep

    def fail(self, number, *others):
        if number == 1:
            raise RuntimeError("broken")
        keep(self, number, *others)

    monkeypatch.setattr(samples.SampleRunner, "_keep", fail)
    made = train(config_of(demo, SCRIPT, output_dir=tmp_path / "out", **values))
    said = [event["text"] for event in made.events("warning")]
    assert len(said) == 3 and all("the sample of 'b is longer' is left out (RuntimeError: broken)" in s for s in said)


def test_a_folder_that_takes_no_samples_is_one_warning_for_all_of_a_step(demo, values, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sample").write_text("in the way", encoding="utf-8")
    made = train(config_of(demo, SCRIPT, output_dir=tmp_path / "out", **values))
    said = [event["text"] for event in made.events("warning")]
    names = f"the samples of 'a' and 1 more are left out (cannot write {tmp_path / 'out' / 'sample' / '*.png'}: "
    assert len(said) == 3 and all(names in one for one in said)


@pytest.mark.parametrize("text", ["# no prompt\n", "a --w 0\n", b"\x00\xff\x01", None])
def test_prompts_that_become_unusable_leave_those_from_before(demo, values, plain, tmp_path, monkeypatch, text):
    from library.train.evaluation.samples import SampleRunner

    at_first, path = SampleRunner.at_first, tmp_path / "p.txt"

    def spoil(*arguments):
        at_first(*arguments)
        path.unlink()
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    monkeypatch.setattr(SampleRunner, "at_first", spoil)
    made = train(config_of(demo, SCRIPT, output_dir=tmp_path / "out", **values))
    assert made.losses == plain.losses and len(made.events("sample")) == 6
    said = [event["text"] for event in made.events("warning")]
    assert len(said) == (text is not None) and all("the previous prompts are used" in one for one in said)
