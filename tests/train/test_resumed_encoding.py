"""Another way to encode images and captions in a resume is reported where the results differ, and only there."""

import json

import pytest
import torch

from tests.training import config_of, pictures, train

LATENTS, TEXT = "cache_latents", "cache_text_encoder_outputs"
OFF = {LATENTS: False, f"{LATENTS}_to_disk": False, TEXT: False, f"{TEXT}_to_disk": False}
SCRIPTS = ("sdxl_train_network", "flux_train_network")


def kept(*names):
    return OFF | dict.fromkeys(names, True)


STEPWISE, MEMORY, DISK = kept(), kept(LATENTS, TEXT), kept(LATENTS, TEXT, f"{LATENTS}_to_disk", f"{TEXT}_to_disk")
# How a training encodes, how its resume does, and what of that keeps the resume from being exact.
CHANGES = {
    "the same": (STEPWISE, STEPWISE, []),
    "latents once": (STEPWISE, kept(LATENTS), [f"{LATENTS} was false and is true"]),
    "latents in each step": (kept(LATENTS), STEPWISE, [f"{LATENTS} was true and is false"]),
    "latents to disk at once": (STEPWISE, kept(f"{LATENTS}_to_disk"), [f"{LATENTS} was false and is true"]),
    "captions once": (STEPWISE, kept(TEXT), [f"{TEXT} was false and is true"]),
    "captions in each step": (kept(TEXT), STEPWISE, [f"{TEXT} was true and is false"]),
    "on disk": (MEMORY, DISK, []),
    "in memory": (DISK, MEMORY, []),
    "larger batches": (MEMORY, MEMORY | {"vae_batch_size": 3}, ["vae_batch_size was 1 and is 3"]),
    "larger batches, not used": (STEPWISE, STEPWISE | {"vae_batch_size": 3}, []),
    "larger batches on disk": (DISK, DISK | {"vae_batch_size": 3}, []),
    "larger batches from disk": (DISK, MEMORY | {"vae_batch_size": 3}, ["vae_batch_size was 1 and is 3"]),
}
TEXT_BATCHES = {
    "the batch size written out": (MEMORY, MEMORY | {"text_encoder_batch_size": 1}, []),
    "more captions": (MEMORY, MEMORY | {"text_encoder_batch_size": 3}, ["text_encoder_batch_size was 1 and is 3"]),
    "more captions on disk": (DISK, DISK | {"text_encoder_batch_size": 3}, []),
}
CASES = [
    *((script, name, *change) for script in SCRIPTS for name, change in CHANGES.items()),
    *(("flux_train_network", name, *change) for name, change in TEXT_BATCHES.items()),
]


@pytest.mark.parametrize(("script", "name", "before", "after", "told"), CASES, ids=lambda value: str(value)[:24])
def test_what_is_encoded_otherwise_is_told_and_what_is_not_told_is_exact(
    demo, tmp_path, script, name, before, after, told
):
    images = pictures(tmp_path / "images", repeats=1)

    def run(folder, **values):
        quick = {"max_train_steps": 4, "seed": 3, "network_dim": 2, "network_train_unet_only": True}
        quick |= {"output_name": "m", "save_every_n_steps": 2, "save_state": True, "train_batch_size": 1}
        return train(config_of(demo, script, train_data_dir=images, output_dir=tmp_path / folder, **quick, **values))

    straight = run("straight", **before)
    resumed = run("resumed", resume=tmp_path / "straight" / "m-step00000002-state", **after)
    warnings = [event["text"] for event in resumed.events("warning") if event["text"].startswith("resume")]
    if told:
        (warning,) = warnings
        assert warning.endswith(f"not bit-exactly: {'; '.join(told)}")
    else:
        assert not warnings
        tensors = resumed.tensors()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in straight.tensors().items())


@pytest.mark.parametrize(("prefix", "told"), [("photo of", True), (None, False)])
def test_cached_captions_that_an_older_version_encoded_as_written_are_reported(demo, tmp_path, prefix, told):
    quick = {"train_data_dir": pictures(tmp_path / "images", repeats=1), "output_name": "m", "save_state": True}
    quick |= {"network_dim": 2, "network_train_unet_only": True, "caption_prefix": prefix, **MEMORY}
    train(config_of(demo, "flux_train_network", output_dir=tmp_path, max_train_steps=1, **quick))
    facts = json.loads((tmp_path / "m-state" / "train_state.json").read_text())
    older = {name: value for name, value in facts.items() if name not in ("checksums", "arithmetic", "held_out")}
    (tmp_path / "m-state" / "train_state.json").write_text(json.dumps(older))
    (tmp_path / "m-state" / "SHA256SUMS").unlink()
    quick |= {"output_dir": tmp_path / "resumed", "resume": tmp_path / "m-state"}
    resumed = train(config_of(demo, "flux_train_network", max_train_steps=2, **quick))
    warnings = [event["text"] for event in resumed.events("warning") if "not bit-exactly: " in event["text"]]
    said = "now encoded with prefix, suffix, wildcards and trigger phrase, and before as written: 4 captions"
    assert [text.endswith(said) for text in warnings] == [True] * told
