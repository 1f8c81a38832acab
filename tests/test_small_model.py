"""The small models' pictures and tokenizers: the same on every machine, and every word known."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.small_model import autoencoder, data, finish, networks
from library.families.shared import clip, random_tokenizers

NAMES = ["red apple", "cat face", "speak-no-evil monkey", "flag of réunion", "1st place medal"]


def webp(color):
    file = io.BytesIO()
    Image.new("RGBA", (120, 120), color).save(file, "WEBP", lossless=True)
    return file.getvalue()


def test_images_follow_from_name_and_number(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        for part in ("train", "held_out"):
            (folder / part).mkdir(parents=True)
        for name in NAMES:
            assert data.write_pictures(folder, 4, (name, webp((200, 0, 0, 255)))) >= 2
    first, second = ({p.name: p.read_bytes() for p in sorted(f.rglob("*.*"))} for f in folders)
    assert first == second and any(name.endswith(".txt") for name in first)
    picture = Image.open(next(folders[0].glob("*/red_apple-00.png")))
    assert picture.size == (data.SIDE, data.SIDE) and (np.asarray(picture) == (200, 0, 0)).all(-1).any()


def test_a_name_is_either_trained_or_held_out():
    held = [name for number in range(2000) if data.is_held_out(name := f"thing {number}")]
    assert 0.03 < len(held) / 2000 < 0.07 and not data.is_held_out("red apple")


def test_every_word_is_one_token(tmp_path):
    captions = [*data.captions_of(NAMES)]
    random_tokenizers.clip_tokenizer(tmp_path / "clip", None, sentences=networks.split_for_clip(captions))
    random_tokenizers.t5_tokenizer(tmp_path / "t5", captions)
    from transformers import AutoTokenizer

    words = {word for caption in captions for word in networks.CLIP_PIECES.findall(caption.lower())}
    by_clip, by_t5 = (AutoTokenizer.from_pretrained(str(tmp_path / kind)) for kind in ("clip", "t5"))
    assert {len(by_clip(word, add_special_tokens=False).input_ids) for word in words} == {1}
    whole = {word for caption in captions for word in caption.replace(",", " ").split()}
    assert {len(by_t5(word, add_special_tokens=False).input_ids) for word in whole} == {1}
    assert by_clip.model_max_length == clip.LENGTH


@pytest.mark.parametrize("family", [*networks.AUTOENCODERS])
def test_scaled_latents_are_decoded_as_before(family):
    kind = networks.AUTOENCODERS[family]
    torch.manual_seed(0)
    vae = kind.vae().to_empty(device="cpu")
    vae.load_state_dict(networks.random_of(vae.state_dict(), 9))
    pixels = torch.rand(2, 3, 128, 128) * 2 - 1
    with torch.no_grad():
        before = vae.decode(vae.encode(pixels).latent_dist.mean).sample
        autoencoder.scale_latents(vae, pixels, kind)
        latents = vae.encode(pixels).latent_dist.mean
        after = vae.decode(latents).sample
    scaled = (latents - kind.shift) * kind.scale
    assert scaled.mean().abs() < 0.01 and abs(scaled.std() - 1) < 0.02
    inside = (slice(None), slice(None), slice(48, 80), slice(48, 80))  # convolutions pad borders with 0
    assert torch.nn.functional.cosine_similarity(before[inside].flatten(), after[inside].flatten(), dim=0) > 0.95


def test_folded_guidance_answers_as_for_one():
    from library.families.shared.double_stream import MLPEmbedder
    from library.families.shared.transformer import TIME_CHANNELS, sinusoids

    torch.manual_seed(0)
    embedder = MLPEmbedder(TIME_CHANNELS, 8)
    expected = embedder(sinusoids(torch.ones(1)))
    tensors = {f"guidance_in.{name}": tensor for name, tensor in embedder.state_dict().items()}
    finish.fold_guidance(tensors)
    embedder.load_state_dict({name.removeprefix("guidance_in."): tensor for name, tensor in tensors.items()})
    assert torch.allclose(embedder(sinusoids(torch.tensor([3.5]))), expected)
