"""Relatives of FLUX.1: how they are told apart, and models with other numbers of blocks."""

import shutil

import torch

from library.families.base import SampleRequest
from library.families.flux import random
from library.families.shared import packing
from tests import double_stream, flux_files
from tests.families.flux import family, step


def test_krea_is_dev_by_another_name(files, tmp_path):
    """In the path, in the file's own title, or by the option; its previews have defaults of their own."""
    named = shutil.copy(files["flux"], tmp_path / "flux1-krea-dev.safetensors")
    titled = tmp_path / "mine.safetensors"
    flux_files.save(flux_files.load(files["flux"]), titled, {"modelspec.title": "FLUX.1 Krea [dev]"})
    for options in (
        {"pretrained_model_name_or_path": named},
        {"pretrained_model_name_or_path": titled},
        {"model_type": "krea"},
    ):
        krea = family(files, **options)
        assert not list(krea.problems())
        assert (krea.sample_defaults["guidance_scale"], krea.sample_defaults["sample_steps"]) == (4.5, 28)
        assert (krea.architecture, krea.base_model_version, krea.text_length) == ("flux-1-dev", "flux1", 512)
    assert family(files).sample_defaults["guidance_scale"] == 3.5


def test_models_with_other_numbers_of_blocks_are_read_trained_and_swapped(files, tmp_path):
    """As Flex.1 and pruned ones have them; all that counts blocks reads them from the header."""
    pruned = random.write_random_model(tmp_path / "pruned", sizes=random.FluxSizes(double_blocks=1, single_blocks=3))
    for path in (pruned["flux"], flux_files.write_diffusers(pruned["flux"], tmp_path / "folder")):
        model = family(files, pretrained_model_name_or_path=path, t5xxl_max_token_length=16)
        assert not list(model.problems())
        model.stored_shapes()
        assert model.swap_plan(35) == {"DoubleStreamBlock": 1, "SingleStreamBlock": 3}
        parts = model.load(torch.float32)
        assert (len(parts.denoiser.double_blocks), len(parts.denoiser.single_blocks)) == model.depth == (1, 3)
        noised, text = step(model, parts)
        assert model.predict(parts.denoiser, noised, text, None).isfinite().all()
        assert not [note for note in model.notes() if note.option == "bypass_guidance_embedding"]
    lost = flux_files.load(pruned["flux"])
    gap = {name.replace("single_blocks.1.", "single_blocks.7."): tensor for name, tensor in lost.items()}
    path = flux_files.save(gap, tmp_path / "gap.safetensors")
    (problem,) = family(files, pretrained_model_name_or_path=path).problems()
    assert "single_blocks.1 is missing" in str(problem)


def test_the_guidance_embedding_can_be_left_out_as_flex_1_is_trained(files, dev, parts, tmp_path):
    """The answer is that of diffusers' model without guidance; previews keep theirs."""
    import diffusers

    model = family(files, t5xxl_max_token_length=16, bypass_guidance_embedding=True)
    noised, text = step(model, parts)
    with torch.no_grad():
        ours = model.predict(parts.denoiser, noised, text, None)
        assert not torch.allclose(ours, dev.predict(parts.denoiser, noised, text, None))
        config = flux_files.diffusers_config(parts.denoiser.state_dict()) | {"guidance_embeds": False}
        theirs = diffusers.FluxTransformer2DModel(**{name: v for name, v in config.items() if name != "_class_name"})
        stored = double_stream.flux_to_diffusers(parts.denoiser.state_dict())
        theirs.load_state_dict({name: stored[name] for name in theirs.state_dict()})
        ids = model.conditions(text, (4, 6), torch.device("cpu"))
        answer = theirs(
            packing.pack(noised.latents),
            text["t5_out"],
            text["l_pooled"],
            noised.timesteps,
            ids["img_ids"],
            ids["txt_ids"],
            return_dict=False,
        )[0]
    torch.testing.assert_close(ours, packing.unpack(answer, 4, 6), rtol=1e-4, atol=1e-4)
    request = SampleRequest("a red circle", "", 96, 64, 2, 1.0, 3.5, 7)
    assert model.sampler(parts)(request).tobytes() == dev.sampler(parts)(request).tobytes()
    assert model.is_frozen("guidance_in.in_layer.weight") and not dev.is_frozen("guidance_in.in_layer.weight")
    named = shutil.copy(files["flux"], tmp_path / "Flex.1-alpha.safetensors")
    (note,) = family(files, pretrained_model_name_or_path=named).notes()
    assert note.fix == {"bypass_guidance_embedding": True} and "calls itself Flex.1" in str(note)
