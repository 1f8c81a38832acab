"""What lies beside images: masks that cannot be meant, images that learn from themselves, files of other programs."""

import io
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from library import data
from library.check import report
from library.config.run_config import ControlUse
from library.curation import scanning
from library.data import folders, pixels
from library.masking import files
from tests.data import make

SIZE = (64, 64)


def grey(value):
    return Image.new("L", SIZE, value)


def half():
    mask = grey(0)
    mask.paste(255, (0, 0, 32, 64))
    return mask


def labels():
    return Image.fromarray(np.asarray(half()) // 255)


def classes():
    """Numbers of four classes."""
    return Image.fromarray(np.repeat(np.arange(4, dtype=np.uint8), 16 * 64).reshape(64, 64))


def hidden(noise=0):
    mask = Image.new("RGBA", SIZE, (255, 255, 255, 0))
    mask.paste((255 - noise, 255, 255, 255), (0, 0, 32, 64))
    return mask


def green():
    mask = Image.new("RGB", SIZE)
    mask.paste((0, 255, 0), (0, 0, 32, 64))
    return mask


def yellow():
    mask = Image.new("RGB", SIZE)
    mask.paste((255, 255, 0), (0, 0, 32, 64))
    return mask


def stroke():
    """White on transparency, of which the colors are black: what is painted counts."""
    mask = Image.new("RGBA", SIZE)
    mask.paste((255, 255, 255, 255), (0, 0, 32, 64))
    return mask


@pytest.fixture
def use(monkeypatch):
    """A function: what the trained model is shown besides noise and words."""

    def change(**values):
        monkeypatch.setattr(type(make.config(None)), "control_images", property(lambda _: ControlUse(**values)))

    return change


def dataset(tmp_path, more="", **values):
    text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'x'}'\n{more}"
    (tmp_path / "d.toml").write_text(text)
    return make.config(None, dataset_config=str(tmp_path / "d.toml"), **values)


def masked(tmp_path, *masks, **values):
    make.folder(tmp_path, "x", (SIZE,) * len(masks))
    (tmp_path / "masks").mkdir()
    for number, mask in enumerate(masks):
        mask.save(tmp_path / "masks" / f"{number:02d}.png")
    return dataset(tmp_path, f"conditioning_data_dir = '{tmp_path / 'masks'}'", **{"masked_loss": True, **values})


def said(config):
    """The problems and the remarks about data, as text."""
    report = data.check_data(config, 32)
    return [str(problem) for problem in report.problems], [str(problem) for problem in report.warnings], report


MISTAKES = [
    ([grey(0), grey(0)], "all masks are black", ""),
    ([half(), grey(0)], "", "black masks, whose images have no effect"),
    ([half(), labels()], "values of 0 and 1", ""),
    ([half(), hidden()], "shape is in their transparency", ""),
    ([half(), hidden(noise=3)], "shape is in their transparency", ""),
    ([classes(), grey(2)], "all masks are nearly black", ""),
    ([half(), grey(2)], "", "masks that are nearly black"),
    ([half(), green()], "without red", ""),
    ([half(), yellow()], "", "only red counts"),
    ([grey(255), grey(255)], "", "changes nothing"),
    ([half(), half()], "", ""),
    ([half(), stroke()], "", ""),
    ([half(), grey(25)], "", ""),
]


@pytest.mark.parametrize(("masks", "problem", "remark"), MISTAKES)
def test_masks_that_cannot_be_meant_are_named(tmp_path, masks, problem, remark):
    stops, notes, check = said(masked(tmp_path, *masks))
    notes = [note for note in notes if "mask" in note]
    assert [problem] == [problem for _ in stops if problem and problem in stops[0]] or not (problem or stops)
    assert any(remark in note for note in notes) if remark else not notes
    if problem or remark:
        place = str(tmp_path / "masks")
        assert "01.png" in stops[0] and place in stops[0] if stops else "01.png" in notes[0] or not check.problems
    assert bool(check.masks) is not bool(stops)


def test_how_much_counts_is_reported(tmp_path, capsys):
    config = masked(tmp_path, half(), grey(255), grey(0))
    _, _, check = said(config)
    assert str(check.masks) == "masks: 3 of 3 images; 50% of their area counts"
    assert "masks: 3 of 3 images; 50% of their area counts" in [
        str(finding_of_report.text) for finding_of_report in report.make_report(config).findings
    ]


def test_masks_that_are_the_images_are_refused(tmp_path):
    make.folder(tmp_path, "x", (SIZE,) * 2)
    shutil.copytree(tmp_path / "x", tmp_path / "copy")
    for folder in ("x", "copy"):
        stops, _, _ = said(dataset(tmp_path, f"conditioning_data_dir = '{tmp_path / folder}'", masked_loss=True))
        assert len(stops) == 1 and "masks that are the images themselves" in stops[0]


def test_transparency_that_hides_whole_images(tmp_path):
    for number, alpha in enumerate((0, 255, 0)):
        make.picture(tmp_path / "1_cat" / f"{number}.png")
        Image.new("RGBA", SIZE, (9, 9, 9, alpha)).save(tmp_path / "1_cat" / f"{number}.png")
    _, notes, check = said(make.config(tmp_path, alpha_mask=True))
    (note,) = [note for note in notes if "fully transparent" in note]
    assert "0.png" in note and "2.png" in note and "1.png" not in note
    assert str(check.masks) == "masks: 3 of 3 images; 33% of their area counts"
    (tmp_path / "1_cat" / "1.png").unlink()
    assert "all images are fully transparent" in said(make.config(tmp_path, alpha_mask=True))[0][0]


def test_opaque_images_have_no_mask(tmp_path):
    make.folder(tmp_path, "1_cat")
    _, notes, check = said(make.config(tmp_path, alpha_mask=True))
    assert any("alpha_mask has no effect" in note for note in notes) and check.masks is None


def test_an_inpainting_model_needs_something_to_paint(tmp_path, use):
    use(inpaints=True)
    stops, _, _ = said(masked(tmp_path, grey(0), grey(100), masked_loss=False))
    assert len(stops) == 1 and "nothing would be painted" in stops[0]
    half().save(tmp_path / "masks" / "00.png")
    stops, notes, check = said(dataset(tmp_path, f"conditioning_data_dir = '{tmp_path / 'masks'}'"))
    assert not stops and any("bright nowhere" in note and "01.png" in note for note in notes)
    assert str(check.masks) == "masks: 2 of 2 images; 25% of their area is to be painted"


@pytest.mark.parametrize("name", ["00.PNG", "00.Jpg", "00.webp", "00.BMP", "00.avif"])
def test_masks_are_found_in_any_case_and_format(tmp_path, name):
    if Path(name).suffix not in folders.extensions() and name.endswith(".avif"):
        pytest.skip("no decoder of AVIF is installed")
    config = masked(tmp_path, half())
    (tmp_path / "masks" / "00.png").unlink()
    half().convert("RGB").save(tmp_path / "masks" / name)
    (image,) = data.scan(config).items
    assert image.mask_file == str(tmp_path / "masks" / name)
    assert files.mask_file(tmp_path / "x" / "00.png", tmp_path / "x", tmp_path / "masks") == Path(image.mask_file)


def test_masks_of_macos_are_found(tmp_path):
    config = masked(tmp_path, half())
    (tmp_path / "x" / "00.png").rename(tmp_path / "x" / unicodedata.normalize("NFC", "caf\u00e9.png"))
    mask = tmp_path / "masks" / unicodedata.normalize("NFD", "caf\u00e9.png")
    (tmp_path / "masks" / "00.png").rename(mask)
    (image,) = data.scan(config).items
    assert image.mask_file == str(mask)
    assert files.mask_file(Path(image.path), tmp_path / "x", tmp_path / "masks") == mask


def test_masks_of_onetrainer_are_no_training_images(tmp_path):
    folder = make.folder(tmp_path, "1_cat", (SIZE,) * 2)
    half().save(folder / "00-masklabel.png")
    make.picture(folder / "01-condlabel.png")
    make.picture(folder / "other-masklabel.png")  # an image of its own, as there is no other.png
    names = ["00.png", "01.png", "other-masklabel.png"]
    images = data.scan(make.config(tmp_path))
    assert [Path(image.path).name for image in images.items] == names
    assert not any(image.mask_file for image in images.items)
    (masks,) = [picture for picture in images.warnings if "masks of OneTrainer" in str(picture)]
    assert masks.fix == {"masked_loss": True} and "00-masklabel.png" in str(masks)
    assert any("01-condlabel.png" in str(picture) for picture in images.warnings)
    opened = scanning.scan_collection(tmp_path, make.config(tmp_path))
    assert [Path(picture.path).name for picture in opened.pictures] == names
    assert any("00-masklabel.png" in str(note) for note in opened.notes)
    config = make.config(tmp_path, masked_loss=True)
    first, *others = data.scan(config).items
    assert first.mask_file == str(folder / "00-masklabel.png") and not any(image.mask_file for image in others)
    _, notes, checked = said(config)
    assert str(checked.masks) == "masks: 1 of 3 images; 50% of their area counts"
    assert not any("masked_loss" in note for note in notes)


# ---- references and control images


@pytest.mark.parametrize("kind", ["control_directory", "conditioning_data_dir"])
def test_images_cannot_be_their_own_references(tmp_path, use, kind):
    use(**({"least": 1, "most": 1} if kind == "control_directory" else {"guided": True}))
    make.folder(tmp_path, "x", (SIZE,) * 3)
    (tmp_path / "link").symlink_to(tmp_path / "x", target_is_directory=True)
    for name in ("x", "link", "x/"):
        stops, _, _ = said(dataset(tmp_path, f"{kind} = '{tmp_path}/{name}'"))
        assert len(stops) == 1 and stops[0].startswith(f"{kind}: ") and "images themselves" in stops[0]
    shutil.copytree(tmp_path / "x", tmp_path / "second")
    make.picture(tmp_path / "second" / "00.png", seed=9)
    stops, notes, _ = said(dataset(tmp_path, f"{kind} = '{tmp_path / 'second'}'"))
    (note,) = [note for note in notes if "images themselves" in note]
    assert not stops and "01.png" in note and "00.png" not in note


@pytest.mark.parametrize("takes", [{}, {"inpaints": True}])
def test_a_model_without_references_says_so_once(tmp_path, use, takes):
    use(**takes)
    make.folder(tmp_path, "x", (SIZE,) * 3)
    stops, notes, _ = said(dataset(tmp_path, f"control_directory = '{tmp_path / 'x'}'"))
    assert not any("images themselves" in text for text in (*stops, *notes))


def test_pairs_in_one_folder_are_told_apart_by_suffixes(tmp_path, use):
    use(least=1, most=2)
    for number in range(2):
        for seed, name in enumerate(("T", "R", "R_1")):
            make.picture(tmp_path / "x" / f"{number}_{name}.png", seed=3 * number + seed)
        (tmp_path / "x" / f"{number}_T.txt").write_text("a cat")
    config = dataset(tmp_path, "image_suffix = '_T'\ncontrol_suffix = '_R'")
    stops, notes, check = said(config)
    assert not stops and not [note for note in notes if "no training image" in note or "without a" in note]
    shown = {Path(i.path).name: [Path(control.path).name for control in i.controls] for i in check.images.items}
    assert shown == {f"{n}_T.png": [f"{n}_R.png", f"{n}_R_1.png"] for n in range(2)}


def test_suffixes_that_leave_no_image_are_named(tmp_path, use):
    use(least=1, most=1)
    make.folder(tmp_path, "x", (SIZE,) * 2)
    stops, notes, _ = said(dataset(tmp_path, "image_suffix = '_T'\ncontrol_suffix = '_R'"))
    assert len(stops) == 1 and "image_suffix = '_T'" in stops[0] and not any("without a" in note for note in notes)


def test_pairs_whose_images_have_no_suffix(tmp_path, use):
    use(least=1, most=1)
    make.folder(tmp_path, "x", (SIZE,) * 2)
    for number in range(2):
        make.picture(tmp_path / "x" / f"0{number}_R.png", seed=9 + number)
    stops, _, check = said(dataset(tmp_path, "control_suffix = '_R'"))
    shown = {Path(i.path).name: [Path(control.path).name for control in i.controls] for i in check.images.items}
    assert not stops and shown == {"00.png": ["00_R.png"], "01.png": ["01_R.png"]}


@pytest.mark.parametrize("kind", ["control_directory", "conditioning_data_dir"])
def test_files_without_an_image_are_named(tmp_path, use, kind):
    use(**({"least": 1, "most": 1} if kind == "control_directory" else {}))
    make.folder(tmp_path, "x", (SIZE,) * 2)
    for number in (0, 1, 7):
        half().save(make.picture(tmp_path / "second" / f"0{number}.png", seed=number + 5))
    more = {"masked_loss": True} if kind == "conditioning_data_dir" else {}
    stops, notes, _ = said(dataset(tmp_path, f"{kind} = '{tmp_path / 'second'}'", **more))
    (note,) = [note for note in notes if "no training image" in note]
    assert not stops and note.endswith(": 07.png")


def test_images_cannot_be_learned_and_regularise(tmp_path):
    make.folder(tmp_path, "1_cat")
    for path in (tmp_path, f"{tmp_path}/", tmp_path / "1_cat" / ".."):
        stops, _, _ = said(make.config(tmp_path, reg_data_dir=str(path)))
        assert len(stops) == 1 and stops[0].startswith("reg_data_dir: ") and "1_cat" in stops[0]
    make.folder(tmp_path, "x")
    first = f"[[datasets.subsets]]\nimage_dir = '{tmp_path / 'x'}'\nis_reg = true\n"
    stops, _, _ = said(dataset(tmp_path, f"[[datasets]]\nresolution = 128\n{first}"))
    assert len(stops) == 1 and stops[0].startswith("is_reg: ")


@pytest.mark.parametrize("again", ["{0}/", "{0}/.", "{0}/../x", "{0}"])
def test_a_folder_is_the_same_however_it_is_written(tmp_path, again):
    make.folder(tmp_path, "x", (SIZE,))
    more = f"[[datasets.subsets]]\nimage_dir = '{again.format(tmp_path / 'x')}'\nnum_repeats = 5"
    _, notes, check = said(dataset(tmp_path, more))
    assert len(check.images) == 1 and [note for note in notes if "given again" in note]


def wide(values, kind):
    """The left half of a mask with more than 8 bits has the first of two values, the right half the second."""
    stored = np.zeros((SIZE[1], SIZE[0]), kind)
    stored[:, : SIZE[0] // 2], stored[:, SIZE[0] // 2 :] = values
    return Image.fromarray(stored)


WIDE = [  # values, type, what is said, or the share that counts
    ((0, 255), np.uint16, "masks of more than 8 bits with values up to 255"),
    ((0, 1), np.uint16, "masks of more than 8 bits with values of 0 and 1"),
    ((0, 255), np.int32, "masks of more than 8 bits with values up to 255"),
    ((0, 1), np.int32, "masks of more than 8 bits with values of 0 and 1"),
    ((100_000, 2_000_000), np.int32, "masks of 32 bits with different values above 65535"),
    ((0, 1), np.float32, "masks of decimal numbers up to 1"),
    ((0.25, 0.5), np.float32, "masks of decimal numbers up to 1"),
    ((0, 0), np.uint16, "all masks are black"),
    ((0, 0), np.float32, "all masks are black"),
    ((0, 65535), np.uint16, "50%"),
    ((0, 65535), np.int32, "50%"),
    ((0, 2_000_000), np.int32, "50%"),
    ((0, 255), np.float32, "50%"),
]


@pytest.mark.parametrize(("values", "kind", "words"), WIDE)
def test_masks_of_more_than_8_bits_are_reported_for_what_they_are(tmp_path, values, kind, words):
    make.folder(tmp_path, "x", (SIZE,))
    (tmp_path / "masks").mkdir()
    path = tmp_path / "masks" / "00.png"
    wide(values, kind).save(path, "PNG" if kind is np.uint16 else "TIFF")
    config = dataset(tmp_path, f"conditioning_data_dir = '{tmp_path / 'masks'}'", masked_loss=True)
    stops, _, check = said(config)
    if words == "50%":
        assert not stops and words in str(check.masks)
    else:
        assert len(stops) == 1 and words in stops[0] and str(path) in stops[0]
    mask = pixels.read_mask(path)  # and the data set tab shows what is trained
    with Image.open(io.BytesIO(files.mask_overlay(path, 64))) as shown:
        clear = np.asarray(shown.convert("RGBA").getchannel("A"))
    assert (255 - clear == mask).all()


@pytest.mark.parametrize("masked", [True, False])
def test_a_file_is_named_once_however_many_sizes_its_image_has(tmp_path, masked):
    make.folder(tmp_path, "x", (SIZE, SIZE))
    shutil.copytree(tmp_path / "x", tmp_path / "masks")
    paths = [tmp_path / "masks" / name for name in ("00.png", "01.png")]
    for path in paths if masked else ():
        wide((0, 255), np.uint16).save(path)
    text = f"""[[datasets]]\nresolution = "128;64"\nmin_bucket_reso = 64\n[[datasets.subsets]]
image_dir = '{tmp_path / "x"}'\nconditioning_data_dir = '{tmp_path / "masks"}'"""
    stops, _, _ = said(dataset(tmp_path, text, masked_loss=True))
    wrong = "values up to 255" if masked else "masks that are the images themselves"
    [told] = [stop for stop in stops if wrong in stop]
    assert all(told.count(path.name) == 1 for path in paths)
