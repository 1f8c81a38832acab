"""Captions by tiny models made on the spot: the right tags, the model's own words, and nothing lost."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from library.captioning import describer, shell, wd14, writing
from library.captioning.forms import FORMS
from library.captioning.wd14 import Limits, Tagger
from library.config.problems import ConfigError
from library.curation import trash
from library.downloads import model_folder
from tests import source
from tests.curation.test_trash import tree
from tests.downloads.conftest import hub  # noqa: F401 (a fixture)

TAGS = [("general", "9"), ("explicit", "9"), ("red_dress", "0"), ("blue_sky", "0"), ("some_body", "4"), (">_<", "0")]
# Rows: how much blue, green and red each tag wants (the taggers are fed BGR).
WEIGHTS = np.array([[0.1, 0.9, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0.5], [0.8, 0.2, 1, 0, 0.9, 0]], np.float32)


@pytest.fixture
def tagger(tmp_path):
    return tagger_at(tmp_path / "tagger")


def tagger_at(folder, batch=None, first=False):
    """A tagger that looks at the average colour."""
    onnx = pytest.importorskip("onnx")
    if importlib.util.find_spec("onnxruntime") is None:  # not imported here: how that is done is under test
        pytest.skip("onnxruntime is not installed")
    from onnx import TensorProto, helper

    folder.mkdir()
    shape = [batch or "batch", 3, 8, 8] if first else [batch or "batch", 8, 8, 3]
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3] if first else [1, 2], keepdims=0),
        helper.make_node("MatMul", ["mean", "w"], ["y"]),
    ]
    value_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, [shape[0], len(TAGS)])
    weights = helper.make_tensor("w", TensorProto.FLOAT, WEIGHTS.shape, (WEIGHTS / 255).flatten())
    graph = helper.make_graph(nodes, "tiny", [value_info], [answer], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    rows = [f"{at},{name},{kind},1" for at, (name, kind) in enumerate(TAGS)]
    (folder / "selected_tags.csv").write_text("\n".join(["tag_id,name,category,count", *rows]) + "\n")
    return folder


def plain(colour, size=(12, 8)):
    return Image.new("RGB", size, colour)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    (folder / "10_x").mkdir(parents=True)
    for at, colour in enumerate(("red", "blue", "red")):
        plain(colour, (8, 8)).save(folder / "10_x" / f"{at}.png")
    (folder / "10_x" / "2.txt").write_text("mine, Red Dress")
    (folder / "10_x" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    return folder


@pytest.mark.parametrize(("batch", "first"), [(None, False), (1, False), (4, True)])
def test_tags_are_the_models(tmp_path, batch, first):
    tagger = Tagger(tagger_at(tmp_path / "t", batch, first), Limits(), device="cpu")
    red, blue = plain("red", (8, 8)), plain("blue", (8, 8))
    assert tagger.batch_size == (batch or 4)
    assert [tagger([red])[0], tagger([blue])[0]] == ["some body, red dress", "blue sky"]
    if batch != 1:
        assert tagger([red, blue, red]) == ["some body, red dress", "blue sky", "some body, red dress"]


def test_tags_follow_thresholds_and_unwanted_words(tagger):
    red = [plain("red", (8, 8))]
    for limits, wanted in (
        (Limits(character=0.95), "red dress"),
        (Limits(undesired="Red dress"), "some body"),
        (Limits(undesired="red_Dress"), "some body"),
        (Limits(undesired="red dress", underscores=True), "some_body"),
        (Limits(rating=True), "general, some body, red dress"),
        (Limits(underscores=True), "some_body, red_dress"),
    ):
        assert Tagger(tagger, limits, device="cpu")(red) == [wanted]
    assert Tagger(tagger, Limits(), device="cpu")([plain("#00ff00", (8, 8))]) == [">_<"]


def test_images_are_put_on_a_white_square_in_bgr():
    picture = wd14.prepare_picture(plain("red", (8, 4)), 8)
    assert picture.shape == (8, 8, 3) and picture.dtype == np.float32
    assert picture[0, 0].tolist() == [255, 255, 255] and picture[4, 4].tolist() == [0, 0, 255]


def test_words_are_kept_unless_asked_otherwise_and_come_back(tagger, images, capsys):
    start = tree(images)
    common = ["wd14", str(images), "--model", str(tagger), "--prefix", "zorb", "--device", "cpu"]
    assert shell.main(common) == 0
    here = images / "10_x"
    assert (here / "0.txt").read_text() == "zorb, some body, red dress" and (
        here / "1.txt"
    ).read_text() == "zorb, blue sky"
    assert (here / "2.txt").read_text() == "mine, Red Dress" and not (here / "broken.txt").exists()
    said = capsys.readouterr().out
    assert "2 captions written" in said and "1 image had words already" in said and "broken.png" in said
    assert shell.main([*common, "--existing", "add"]) == 0
    assert (here / "2.txt").read_text() == "mine, Red Dress, zorb, some body"
    assert shell.main([*common, "--existing", "replace"]) == 0
    assert (here / "2.txt").read_text() == "zorb, some body, red dress"
    assert [past.title for past in trash.history(images)] == ["Captions by tagger"] * 3
    for _ in range(3):
        trash.undo(images)
    assert tree(images) == start


def test_what_to_do_in_a_folder_full_of_captions_is_said_in_words_that_the_page_has_too(images, capsys):
    for image in images.rglob("*.png"):
        image.with_suffix(".txt").write_text("words")
    assert shell.main(["wd14", str(images), "--model", "none"]) == 0
    said = capsys.readouterr().out
    assert "choose to add to captions or replace them" in said and "--" not in said


def test_a_folder_is_captioned_however_it_is_named(tagger, images, monkeypatch, capsys):
    monkeypatch.chdir(images.parent)
    (images.parent / "link").symlink_to(images, target_is_directory=True)
    for at, name in enumerate(("images", "link", "./images/10_x")):
        assert shell.main(["wd14", name, "--model", str(tagger), "--existing", "replace", "--prefix", f"w{at}"]) == 0
        assert (images / "10_x" / "0.txt").read_text() == f"w{at}, some body, red dress"


@pytest.mark.parametrize("existing", ["skip", "add"])
def test_captions_that_are_no_text_are_left_and_named(tagger, images, capsys, existing):
    for name, content in {"0": "katze".encode("utf-16-le"), "1": "\u732b".encode("shift-jis")}.items():
        (images / "10_x" / f"{name}.txt").write_bytes(content)
    (images / "10_x" / "2.txt").write_bytes("\u732b".encode("utf-16"))
    before = tree(images)
    assert shell.main(["wd14", str(images), "--model", str(tagger), "--existing", existing, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "2 captions left" in said and "0.txt, 1.txt" in said and "--" not in said
    if existing == "add":
        assert (images / "10_x" / "2.txt").read_text(encoding="utf-8") == "\u732b, some body, red dress"
        trash.undo(images)
    assert tree(images) == before


@pytest.mark.parametrize(
    ("old", "made", "is_tags", "expected"),
    [
        ("a cat\nmore\n", "cat, dog", True, "a cat, cat, dog\nmore\n"),
        ("\n a cat,\r\nmore", "cat", True, "\n a cat, cat\r\nmore"),
        ("a Cat, red_hat", "red hat, cat", True, "a Cat, red_hat, cat"),
        ("on a mat", "a cat, on a mat", False, "on a mat, a cat, on a mat"),
        ("A cat.", "It sits, on a mat.", False, "A cat. It sits, on a mat."),
        ("x, it sits, on a mat", "It sits, on a mat", False, "x, it sits, on a mat"),
    ],
)
def test_what_is_added_goes_to_the_line_that_is_trained(old, made, is_tags, expected):
    assert writing.CaptioningOptions(existing="add").words(made, old, is_tags) == expected


def test_a_stop_keeps_what_is_written_as_one_change(tagger, images):
    start = tree(images)

    def report(message, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writing.write_captions(images, Tagger(tagger, Limits(), 1, "cpu"), writing.CaptioningOptions(), report)
    assert (images / "10_x" / "0.txt").exists() and not (images / "10_x" / "1.txt").exists()
    trash.undo(images)
    assert tree(images) == start


def words(folder):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "blue", "cat", "hat", "on", "the", "of"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        bos_token="[CLS]",
        eos_token="[SEP]",
    )


def pictures_of(folder, side=16):
    from transformers import ViTImageProcessorPil

    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)


def vit_gpt2(folder):
    import torch
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = ViTConfig(**small, image_size=16, patch_size=8)
    text = GPT2Config(
        vocab_size=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3, add_cross_attention=True
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    model = VisionEncoderDecoderModel(config)
    model.generation_config.decoder_start_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    words(folder).save_pretrained(folder)
    pictures_of(folder)


def blip(folder):
    import torch
    from transformers import BlipConfig, BlipForConditionalGeneration, BlipImageProcessorPil, BlipProcessor

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = {**small, **special, "vocab_size": 12, "encoder_hidden_size": 16}
    vision = {**small, "image_size": 16, "patch_size": 8}
    BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    processor = BlipProcessor(BlipImageProcessorPil(size={"height": 16, "width": 16}), words(folder))
    processor.save_pretrained(folder)


CHAT = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %} the"
)


def llava(folder):
    """A model that one talks to: the question goes before its answer."""
    import torch
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
    from transformers import LlavaForConditionalGeneration as Llava

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = words(folder)
    vocabulary.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = LlamaConfig(**small, vocab_size=len(vocabulary), bos_token_id=2, eos_token_id=3, pad_token_id=0)
    vision = CLIPVisionConfig(**small, image_size=16, patch_size=8, projection_dim=16)
    image = vocabulary.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image, image_seq_length=4)
    Llava(config).save_pretrained(folder)
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pictures, vocabulary, chat_template=CHAT, image_token="<image>", **how).save_pretrained(folder)


@pytest.mark.slow
def test_a_model_that_one_talks_to_gives_its_answer_without_the_question(tmp_path):
    llava(tmp_path / "llava")
    model = describer.Describer(
        tmp_path / "llava", "cat on hat of red", describer.Generation(max_tokens=5), batch_size=2, device="cpu"
    )
    pictures = [plain("red"), plain("blue")]
    calls = []
    real = model.model.generate
    model.model.generate = lambda **given: calls.append(given) or real(**given)
    said = model(pictures)
    assert len(said) == 2 and all(len(line.split()) <= 5 for line in said) and any(said)
    asked = model.tokenizer.decode(calls[0]["input_ids"][0], skip_special_tokens=True)
    assert "cat on hat of red" in asked and calls[0]["pixel_values"].shape[0] == 2


@pytest.mark.parametrize("make", [vit_gpt2, blip])
def test_a_local_captioner_says_its_own_words(make, tmp_path, images):
    import torch

    folder = tmp_path / "captioner"
    make(folder)
    model = describer.Describer(folder, "", describer.Generation(max_tokens=6), batch_size=2, device="cpu")
    red, blue = plain("red"), plain("blue")
    said = model([red, blue])
    with torch.no_grad():
        direct = model.model.generate(
            **model.processor(images=[red, blue], return_tensors="pt"), max_new_tokens=6, num_beams=1, do_sample=False
        )
    assert said == [" ".join(s.split()) for s in model.tokenizer.batch_decode(direct, skip_special_tokens=True)]
    assert any(said) and model([red]) == said[:1]
    assert shell.main(["hf", str(images), "--model", str(folder), "--max_tokens", "6", "--prefix", "zorb"]) == 0
    assert (images / "10_x" / "0.txt").read_text().startswith("zorb")


def test_a_prompt_is_what_blip_begins_with(tmp_path):
    blip(tmp_path / "blip")
    model = describer.Describer(tmp_path / "blip", "a red", describer.Generation(max_tokens=4), device="cpu")
    assert model([plain("red")])[0].startswith("a red")
    asked = describer.Describer(tmp_path / "blip", "Detailed", describer.Generation(max_tokens=4), device="cpu")
    assert asked([plain("red")]) and "input_ids" not in asked._inputs([plain("red")])  # it cannot be asked


def test_blips_flags_of_sd_scripts_draw_or_search_and_go_down_all_folders(tmp_path, images, capsys):
    blip(tmp_path / "blip")
    deep = images / "10_x" / "more"
    deep.mkdir()
    plain("blue", (8, 8)).save(deep / "d.png")
    plain("blue", (8, 8)).save(images / "top.jpg")
    start = tree(images)
    common = [str(images), "--caption_weights", str(tmp_path / "blip"), "--max_length", "6", "--min_length", "3"]
    script = source.ROOT / "sd-scripts/finetune/make_captions.py"
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(script), *common, "--beam_search", "--num_beams", "2", "--debug"])
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and not (deep / "d.caption").exists()
    assert (images / "top.caption").read_text() in capsys.readouterr().out
    drawn = []
    for seed in ("1", "1", "2"):
        words = ["--caption_extention", ".txt", "--recursive", "--batch_size", "2", "--top_p", "1", "--seed", seed]
        assert shell.main(["blip", *common, *words]) == 0
        drawn.append([(images / name).read_text() for name in ("top.txt", "10_x/2.txt", "10_x/more/d.txt")])
        assert trash.undo(images).left == ()
    assert drawn[0] == drawn[1] != drawn[2]
    trash.undo(images)
    assert tree(images) == start
    with pytest.raises(ConfigError, match="may hold code and is not opened"):
        shell.main(["blip", str(images), "--caption_weights", "model_large_caption.pth"])
    with pytest.raises(ConfigError, match="min_tokens is 9"):
        shell.main(["blip", str(images), "--min_length", "9", "--max_length", "8"])


def test_a_model_is_downloaded_once_by_its_id(tmp_path, images, hub, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shell, "default_folder", lambda: tmp_path / "models")
    llava(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    others = {
        "modeling.py": b"evil",
        "pytorch_model.bin": b"evil",
        "onnx/model.onnx": b"no",
        "fp16/model.safetensors": b"x",
    }
    hub.repositories = {"some/vlm": {**files, **others}, "some/code": {"modeling.py": b"evil", "model.bin": b"evil"}}
    words = ["hf", str(images), "--model", "some/vlm", "--max_tokens", "3", "--prompt", "Tags", "--device", "cpu"]
    assert shell.main([*words, "--existing", "replace"]) == 0
    here = tmp_path / "models" / "vlm"
    assert {path.name for path in here.iterdir()} == {*files, "downloaded.json"}
    asked = len(hub.requests)
    assert shell.main([*words, "--existing", "replace"]) == 0 and len(hub.requests) == asked  # it is all here
    (here / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="exists and is another file"):
        shell.main([*words, "--existing", "replace"])
    for name, says in (
        ("some/code", "has no model-N-of-N.safetensors or model.safetensors"),
        ("some/none", "There is no"),
        ("../etc", "no readable config.json"),
        ("a/..", "no readable config.json"),
    ):
        with pytest.raises(ConfigError, match=says):
            shell.main([*words[:3], name, "--existing", "replace"])
    hub.gated = {"some/gated": "secret"}
    hub.repositories["some/gated"] = files
    with pytest.raises(ConfigError, match="accept its licence"):
        shell.main([*words[:3], "some/gated", "--existing", "replace"])


def test_what_cannot_be_used_is_one_sentence(tmp_path, images, tagger):
    empty = tmp_path / "empty"
    empty.mkdir()
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps({"model_type": "blip", "auto_map": {"AutoModel": "evil.Model"}}))
    (odd / "evil.py").write_text("open('/tmp/evil', 'w')")
    (odd / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.onnx").write_bytes(b"rubbish")
    (damaged / "selected_tags.csv").write_text("name,category\na,0\n")
    short = tmp_path / "short"
    tagger_at(short)
    (short / "selected_tags.csv").write_text("name,category\na,0\n")
    for argv, says in (
        (["wd14", str(images), "--model", str(empty)], "selected_tags.csv is missing"),
        (["wd14", str(images), "--model", str(damaged)], "cannot be loaded"),
        (["wd14", str(images), "--model", str(short)], "answers with 6 tags"),
        (["wd14", str(empty), "--model", str(tagger)], "no images"),
        (["wd14", str(images), "--model", str(tagger), "--general", "35"], "from 0 to 1"),
        (["wd14", str(images), "--model", str(tagger), "--extension", "txt"], "begins with a dot"),
        (["wd14", str(images), "--model", str(tagger), "--batch_size", "0"], "at least 1"),
        (["hf", str(images), "--model", str(empty)], "no readable config.json"),
        (["hf", str(images), "--model", str(odd)], "no .safetensors weights"),
    ):
        with pytest.raises(ConfigError, match=says) as wrong:
            shell.main(argv)
        assert "\n" not in str(wrong.value)
    assert trash.history(images) == []


@pytest.mark.slow
def test_without_onnx_runtime_one_sentence_says_what_to_install(tmp_path, images):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "model.onnx").write_bytes(b"x")
    (tmp_path / "t" / "selected_tags.csv").write_text("name,category\na,0\n")
    code = "import sys; sys.modules['onnxruntime'] = None\nfrom library.cli.main import main\nmain(sys.argv[1:])"
    words = ["caption", "wd14", str(images), "--model", str(tmp_path / "t")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert "pip install onnxruntime" in done.stderr and "torch" not in done.stderr


@pytest.mark.parametrize("way", list(shell.MODELS))
def test_form_and_shell_propose_the_same_models_with_their_sizes_and_use_the_first(way, capsys):
    field = next(field for field in FORMS.all()[way].fields if field.name == "model")
    assert field.default == next(iter(field.suggestions.values()))
    with pytest.raises(SystemExit):
        shell.main([way, "--help"])
    shown = capsys.readouterr().out
    for title, name in field.suggestions.items():
        assert re.search(r", \d+\.\d GB$", title) and title in shown and name in shown
        assert model_folder.is_repository(name)
    assert shell.build_caption_parser().parse_args([way, "images"]).model == field.default


def test_the_form_is_the_shells_options():
    forms = FORMS.all()
    assert list(forms) == ["wd14", "hf"] and all(f.help for form in forms.values() for f in form.fields)
    kinds = {field.name: field.kind for field in forms["wd14"].fields}
    assert (
        (kinds["folder"], kinds["model"]) == ("folder", "model")
        and kinds["rating"] == "flag"
        and kinds["general"] == "number"
    )
    words = FORMS.words("hf", {"folder": "i", "model": "m", "prompt": "--what"}, lambda text, kind, label: f"/{text}")
    assert words == ["caption", "hf", "/i", "--model=/m", "--prompt=--what"]


@pytest.mark.slow
def test_onnx_runtime_reports_to_nobody(tagger, tmp_path):
    """From 1.29 on it keeps a device id in the user's cache and sends what is used, unless told not to."""
    code = (
        "import sys; from pathlib import Path; from library.captioning.wd14 import Limits, Tagger\n"
        "Tagger(Path(sys.argv[1]), Limits(), device='cpu')"
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PYTHONPATH": os.getcwd()}
    for name in ("ORT_DISABLE_TELEMETRY", "CI", "ORT_RUNNING_UNIT_TESTS"):
        environment.pop(name, None)
    subprocess.run([sys.executable, "-c", code, str(tagger)], env=environment, check=True)
    assert list(home.rglob("*")) == []
