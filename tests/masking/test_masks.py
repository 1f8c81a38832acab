"""Masks by tiny models made on the spot: written where the trainer reads them, and nothing lost."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from library import data
from library.captioning.writing import Written
from library.config.building import build_config
from library.config.problems import ConfigError
from library.curation import trash
from library.data import pixels
from library.families.sdxl.options import SdxlLora
from library.masking import files, shell
from library.masking.files import MaskOptions
from library.masking.segmenter import SegmentationModel
from tests.captioning.test_captioning import words
from tests.curation.test_trash import tree


def clipseg(folder):
    """Finds in each picture what its random weights make of the words."""
    import torch
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation, CLIPSegProcessor, ViTImageProcessorPil

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": 12, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vision = {**small, "image_size": 32, "patch_size": 8}
    more = {"projection_dim": 16, "reduce_dim": 8, "extract_layers": [0, 1], "decoder_num_attention_heads": 2}
    config = CLIPSegConfig(text_config=text, vision_config=vision, **more, decoder_intermediate_size=16)
    CLIPSegForImageSegmentation(config).save_pretrained(folder)
    CLIPSegProcessor(ViTImageProcessorPil(size={"height": 32, "width": 32}), words(folder)).save_pretrained(folder)


def segformer(folder, **labels):
    """Knows classes; its random weights are overruled to find the class of the redder pixels."""
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessorPil

    torch.manual_seed(0)
    encoder_config = {
        "num_encoder_blocks": 1,
        "depths": [1],
        "sr_ratios": [1],
        "hidden_sizes": [8],
        "patch_sizes": [3],
        "strides": [2],
        "num_attention_heads": [1],
        "mlp_ratios": [1],
    }
    names = {0: "wall", 1: "cat", 2: "hat, cap"}
    config = SegformerConfig(
        **encoder_config, decoder_hidden_size=8, id2label=names, label2id={v: k for k, v in names.items()}
    )
    SegformerForSemanticSegmentation(config).save_pretrained(folder)
    SegformerImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)


class Half:
    """Finds the left half of everything."""

    name, batch_size = "half", 2

    def __call__(self, pictures):
        masks = [np.zeros((picture.height, picture.width), np.float32) for picture in pictures]
        for mask in masks:
            mask[:, : mask.shape[1] // 2] = 1
        return masks


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    (folder / "10_x").mkdir(parents=True)
    for at, size in enumerate(((8, 8), (12, 8), (8, 12))):
        Image.new("RGB", size, "red").save(folder / "10_x" / f"{at}.png")
    (folder / "10_x" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    return folder


def quiet(*_):
    """Hears and says nothing."""


def test_masks_of_the_root_of_a_drive_are_in_it(tmp_path, monkeypatch):
    root = Path(tmp_path.anchor)
    assert files.usual_folder(root) == root / "masks"
    assert files.usual_folder(root / "3_cat") == root / "masks" / "3_cat"
    (tmp_path / "cats" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cats" / "inner")
    assert files.usual_folder(Path()) == tmp_path / "cats" / "inner-masks"
    assert files.usual_folder(Path("..")) == tmp_path / "cats-masks"


def test_masks_go_where_the_trainer_reads_them_and_old_ones_are_kept(images, tmp_path):
    masks = files.usual_folder(images)
    assert masks == tmp_path / "images-masks" and files.usual_folder(images / "10_x") == masks / "10_x"
    before = tree(images)
    done = files.make_masks(images, masks, Half(), MaskOptions(), quiet)
    assert done == Written(3, 0, ["broken.png"]) and tree(images) == before
    mask = pixels.read_mask(masks / "10_x" / "1.png")
    assert mask.shape == (8, 12) and mask[:, :6].min() == 255 and mask[:, 6:].max() == 0
    mine = Image.new("L", (8, 8), 7)
    mine.save(masks / "10_x" / "0.png")
    assert files.make_masks(images, masks, Half(), MaskOptions(), quiet).skipped == 3
    assert files.make_masks(images, masks, Half(), MaskOptions("replace", 20, True), quiet).written == 3
    mask = pixels.read_mask(masks / "10_x" / "1.png")
    assert mask[:, :6].max() == 51 and mask[:, 6:].min() == 255
    assert trash.undo(masks).title == "Masks by half"
    assert pixels.read_mask(masks / "10_x" / "0.png").max() == 7
    assert pixels.read_mask(masks / "10_x" / "1.png")[:, :6].min() == 255
    undone = trash.undo(masks)
    assert (undone.count, undone.left) == (2, ("10_x/0.png",)) and files.count_masked_images(
        images, masks
    ) == 1  # which is mine


def test_a_stop_half_way_keeps_what_is_written_and_goes_on(images):
    def stop(message, done, total):
        if done:
            raise KeyboardInterrupt

    masks = files.usual_folder(images)
    with pytest.raises(KeyboardInterrupt):
        files.make_masks(images, masks, Half(), MaskOptions(), stop)
    assert files.count_masked_images(images, masks) == 2
    files.make_masks(images, masks, Half(), MaskOptions(), quiet)
    assert files.count_masked_images(images, masks) == 3 and len(trash.history(masks)) == 2


def test_a_crash_between_two_files_loses_nothing(images, monkeypatch):
    masks = files.usual_folder(images)
    files.make_masks(images, masks, Half(), MaskOptions(), quiet)
    before = tree(masks)
    real = trash.write_atomic

    def broken(path, content):
        if path.name == "1.png":
            raise MemoryError
        return real(path, content)

    monkeypatch.setattr(trash, "write_atomic", broken)
    with pytest.raises(MemoryError):
        files.make_masks(images, masks, Half(), MaskOptions("replace", invert=True), quiet)
    assert tree(masks) != before
    monkeypatch.undo()
    assert trash.undo(masks).left == () and tree(masks) == before


def test_the_trainer_reads_the_masks_that_were_made(images):
    (images / "10_x" / "broken.png").unlink()
    masks = files.usual_folder(images)
    files.make_masks(images, masks, Half(), MaskOptions(), quiet)
    toml = images.parent / "set.toml"
    place = {"image_dir": images / "10_x", "conditioning_data_dir": masks / "10_x"}
    lines = "\n".join(f"{name} = '{path}'" for name, path in place.items())
    toml.write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nnum_repeats = 1\n{lines}\n")
    config = build_config(SdxlLora, {"dataset_config": str(toml), "masked_loss": True}, notes=[])
    mask_by_image = {Path(image.path).name: image.mask_file for image in data.scan(config).items}
    assert mask_by_image == {f"{at}.png": str(masks / "10_x" / f"{at}.png") for at in range(3)}


def test_masks_become_the_transparency_of_images_and_the_images_come_back(images):
    start = tree(images)
    options = MaskOptions(into="alpha")
    assert files.make_masks(images, files.usual_folder(images), Half(), options, quiet).written == 3
    picture = pixels.read_pixels(images / "10_x" / "1.png", alpha=True)
    assert picture[0, :, 3].tolist() == [255] * 6 + [0] * 6 and (picture[:, :, :3] == [255, 0, 0]).all()
    assert not files.usual_folder(images).exists()
    assert files.make_masks(images, files.usual_folder(images), Half(), options, quiet).skipped == 3
    assert trash.undo(images).left == () and tree(images) == start
    Image.new("RGB", (8, 8)).save(images / "photo.jpg")
    with pytest.raises(ConfigError, match="only PNG and WebP"):
        files.make_masks(images, files.usual_folder(images), Half(), options, quiet)


def test_transparency_becomes_masks(images):
    cut = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    cut.putpixel((1, 1), (255, 0, 0, 200))
    cut.save(images / "10_x" / "cut.png")
    assert shell.main(["alpha", str(images)]) == 0
    masks = files.usual_folder(images)
    assert pixels.read_mask(masks / "10_x" / "cut.png").tolist() == [[0] * 4, [0, 200, 0, 0]]
    assert files.count_masked_images(images, masks) == 1


def painted(size, colour=128, kind="PNG"):
    out = io.BytesIO()
    Image.new("L", size, colour).save(out, kind)
    return out.getvalue()


def test_a_painted_mask_takes_the_size_of_its_image_and_anything_else_is_refused(tmp_path):
    masks = tmp_path / "masks"
    (masks / "10_x").mkdir(parents=True)
    shutil.copyfile(__file__, masks / "10_x" / "a.webp")
    files.replace_mask(masks, masks / "10_x" / "a.webp", painted((4, 2)), (40, 20))
    assert pixels.read_mask(masks / "10_x" / "a.png").shape == (20, 40) and not (masks / "10_x" / "a.webp").exists()
    for content, says in (
        (painted((4, 4)), "not have the shape"),
        (painted((4, 2), kind="JPEG"), "this mask was not painted"),
        (b"", "this mask was not painted"),
        (painted((4, 2))[:40], "this mask was not painted"),
        (painted((5000, 2)), "too many pixels"),
    ):
        with pytest.raises(ConfigError, match=says):
            files.replace_mask(masks, masks / "10_x" / "a.png", content, (40, 20))
    with pytest.raises(ConfigError, match="too many pixels"):
        files.replace_mask(masks, masks / "10_x" / "a.png", painted((4, 4)), (16384, 16384))
    trash.undo(masks)
    assert (masks / "10_x" / "a.webp").read_bytes() == Path(__file__).read_bytes()
    assert not (masks / "10_x" / "a.png").exists()


def test_models_find_what_is_requested(tmp_path, images):
    clipseg(tmp_path / "clipseg")
    pictures = [Image.new("RGB", (12, 8), "red"), Image.new("RGB", (8, 20), "blue")]
    segmenter = SegmentationModel(tmp_path / "clipseg", "red cat, hat", 0.5, device="cpu")
    masks = segmenter(pictures)
    assert [mask.shape for mask in masks] == [(8, 12), (20, 8)] and {*np.unique(masks[0])} <= {0.0, 1.0}
    lower = SegmentationModel(tmp_path / "clipseg", "red cat, hat", 0.01, device="cpu")(pictures[:1])[0]
    assert lower.min() == 1.0 and (masks[0] <= lower).all()
    segformer(tmp_path / "segformer")
    every = SegmentationModel(tmp_path / "segformer", "Cat, cap, wall", device="cpu")(pictures)
    assert all(mask.min() == 1.0 for mask in every) and every[1].shape == (20, 8)
    parts = [
        SegmentationModel(tmp_path / "segformer", word, device="cpu")(pictures)[0] for word in ("cat", "hat", "wall")
    ]
    assert np.array_equal(sum(parts), every[0])
    argv = ["model", str(images), "--model", str(tmp_path / "clipseg"), "--words", "cat", "--device", "cpu"]
    assert shell.main(argv) == 0
    assert files.count_masked_images(images, files.usual_folder(images)) == 3
    for folder, text, says in (
        ("segformer", "dog", "knows no class dog: it knows wall, cat, hat, cap"),
        ("clipseg", ",", "words: write"),
        ("none", "cat", "no readable config.json"),
    ):
        with pytest.raises(ConfigError, match=says):
            SegmentationModel(tmp_path / folder, text, device="cpu")
    for kind in ("sam", "birefnet"):
        (tmp_path / "segformer" / "config.json").write_text(
            f'{{"model_type": "{kind}", "auto_map": {{"AutoModel": "x.Y"}}}}'
        )
        with pytest.raises(ConfigError, match=f"is a {kind} model: choose CLIPSeg"):
            SegmentationModel(tmp_path / "segformer", "cat", device="cpu")


def test_what_cannot_be_done_is_one_sentence(images, tmp_path):
    (tmp_path / "empty").mkdir()
    for argv, says in (
        (["alpha", str(tmp_path / "none")], "is not a folder"),
        (["alpha", str(tmp_path / "empty")], "no images"),
        (["alpha", str(images), "--outside", "101"], "from 0 to 100"),
        (["model", str(images), "--model", str(tmp_path / "empty"), "--words", "x"], "no readable config.json"),
        (["model", str(images), "--model", "x", "--words", "x", "--batch_size", "0"], "at least 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            shell.main(argv)
    shutil.copyfile(images / "10_x" / "0.png", images / "10_x" / "0.webp")
    with pytest.raises(ConfigError, match="two images have the mask"):
        files.make_masks(images, files.usual_folder(images), Half(), MaskOptions(), quiet)
