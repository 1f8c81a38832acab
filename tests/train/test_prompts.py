"""Prompt files: lines with options, TOML, JSON, and what is wrong with them."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from library import families
from library.check import sample_prompts
from library.config import ineffective
from library.config.problems import ConfigError
from library.config.run_config import ControlUse
from library.families.base import SampleRequest
from library.sampling import prompt_checks, prompt_rows, prompt_use, prompts
from library.sampling.prompt_checks import PromptUse
from tests.training import LORAS, config_of, shallow  # noqa: F401

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sd_scripts_vectors.json").read_text(encoding="utf-8"))

NO_SHIFT = PromptUse(idle={"flow_shift": "there are no shifts"})


@pytest.mark.parametrize(("line", "expected"), VECTORS["prompt_lines"])
def test_lines_read_as_upstream_reads_them(line, expected):
    assert said(prompts.parse_line(line)) == expected


def said(prompt):
    return {name: value for name, value in asdict(prompt).items() if value is not None}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a --s 5000", {"prompt": "a", "sample_steps": 1000}),
        ("a --s 0", {"prompt": "a", "sample_steps": 0}),  # which is refused
        ("a --d -1", {"prompt": "a"}),
        ("a --w 640px --h 64.5 --H 72", {"prompt": "a", "width": 640, "height": 72}),
        ("a --w many --w\t64 --w64 --q 4", {"prompt": "a"}),
        ("a --l 7.5.2 --g .5x", {"prompt": "a", "guidance_scale": 0.5}),
        ("a --l -1 --g 1e5", {"prompt": "a", "guidance_scale": 1.0}),
        ("a --fs 3 --ctr 0.5 --rcfg x", {"prompt": "a", "flow_shift": 3.0, "cfg_trunc_ratio": 0.5}),
        ("a -- b", {"prompt": "a"}),
        (
            "a  --n  ugly --w  64 --ss  euler_a ",
            {"prompt": "a ", "negative_prompt": "ugly", "width": 64, "sample_sampler": "euler_a"},
        ),  # upstream keeps and needs one blank
        ("a --n --w 64", {"prompt": "a", "width": 64}),
        ("--w 64", {"prompt": "--w 64"}),
        ("a\t--w 64", {"prompt": "a\t--w 64"}),
        ("a--w 64 b", {"prompt": "a--w 64 b"}),
        ("d 42 dalmatians", {"prompt": "d 42 dalmatians", "seed": 42}),
        ("n scale train", {"prompt": "n scale train", "negative_prompt": "scale train"}),
    ],
)
def test_odd_lines_read_as_upstream_reads_them(line, expected):
    assert said(prompts.parse_line(line)) == expected


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_comments_and_blank_lines_are_skipped(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeff# first\n\n  a cat --w 128\n#no\nb\u2028dog --w 1 \n  # one, too\n")
    assert [p.prompt for p in prompts.read_prompts(path)] == ["a cat", "b\u2028dog"]


def test_a_size_is_cut_to_what_can_be_generated_and_steps_are_kept_in_range(tmp_path):
    (read,) = prompts.read_prompts(write(tmp_path, "p.txt", "a --w 10 --h 1000 --s 5000 --ss best"))
    sampled = prompts.with_defaults(read, {"sample_sampler": "euler"}, 64)
    assert (sampled.width, sampled.height, sampled.sample_steps, sampled.sample_sampler) == (64, 960, 1000, "ddim")


def test_options_without_effect_are_named(tmp_path):
    lines = "a --w 64 --s 5000 --ss k_lms\n# --w b\nb --w many --d -2 --fs 3 --n  x\nc -- d --ss best"
    notes = prompt_checks.notes(write(tmp_path, "p.txt", lines), NO_SHIFT)
    expected = [
        ("line 1", "--s 5000"),
        ("line 3", "--w many"),
        ("line 3", "--d -2"),
        ("line 3", "--fs 3"),
        ("line 4", "-- d"),
    ]
    expected.append(("line 4", "ddim"))
    assert len(notes) == 6 and all(a in str(n) and b in str(n) for (a, b), n in zip(expected, notes, strict=True)), (
        notes
    )
    assert len(prompt_checks.notes(tmp_path / "p.txt")) == 5  # of a family that --fs works for


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "a\nb --w many --ci a.png --ci b.png --ss best --rcfg 1 --fs 3"),
        ("p.json", json.dumps(["a", "b --w many --ci a.png --ci b.png --ss best --rcfg 1 --fs 3"])),
        (
            "p.json",
            json.dumps(
                [
                    "a",
                    {
                        "prompt": "b",
                        "control_image_path": ["a.png", "b.png"],
                        "sample_sampler": "best",
                        "renorm_cfg": 1,
                        "flow_shift": 3,
                        "width": 64,
                    },
                ]
            ),
        ),
        (
            "p.toml",
            '[prompt]\nrenorm_cfg = 1\n[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nprompt = "b"\n'
            'control_image_path = ["a.png", "b.png"]\nsample_sampler = "best"\nflow_shift = 3\n',
        ),
    ],
)
def test_options_without_effect_are_named_in_every_format(tmp_path, name, text):
    written = prompt_checks.notes(write(tmp_path, name, text), replace(NO_SHIFT, images=ControlUse(least=1, most=1)))
    second = [
        note for note in written if ", line 2:" in str(note) or ", entry 2:" in str(note) or ", subset 2:" in str(note)
    ]
    told = (
        "b.png is ignored: this model takes at most 1",
        "best is not a known",
        "1 is ignored: it",
        "3 is ignored: there are no shifts",
    )
    for words in told:
        assert any(words in str(note) for note in second), (words, second)
    assert not any("a.png" in str(note) for note in written) and len(second) == 4 + ("many" in text)


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ("a --w 1,024", "--w 1,024", "is read as 1;"),
        ("a --h 1e3", "--h 1e3", "is read as 1;"),
        ("a --w 640px", "--w 640px", "is read as 640;"),
        ("a --l 7,5", "--l 7,5", "is read as 7.0;"),
        ("a --s 5000", "--s 5000", "is read as 1000, the largest"),
        ("--w 64 a cat", "--w", "read as part of the text: write the prompt first"),
        ("N gauge train, red", "N gauge", "is also read as negative_prompt"),
        ("a --w 64 --w 128", "--w 64", "is ignored: --w follows once more"),
        ("a --n ugly --l 2 --n blurry", "--n ugly", "is ignored: --n follows once more"),
        ("a cat,--w 64", "--w", "read as part of the text"),
        ("a cat\t--w 64", "--w", "read as part of the text"),
        ("a cat \u2014w 64", "\u2014w", "read as part of the text"),
        ("a cat --n ugly,--S 4", "--S", "read as part of the text"),
    ],
)
def test_what_is_not_read_whole_is_named(tmp_path, line, what, why):
    for name, text in (("p.txt", line), ("p.json", json.dumps([line]))):
        (note,) = prompt_checks.notes(write(tmp_path, name, text))
        assert f": {what} {why}" in str(note) or f": {what} is {why}" in str(note), str(note)
    for good in ("a well--known red - blue cat", "a --w 640 --l 7.50 --d 042 --n no --text", "a \u2014 b"):
        told = prompt_checks.notes(write(tmp_path, "p.txt", good))
        assert not [remark for remark in told if "read as" in str(remark) or "part of" in str(remark)], good


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": -64}, "width must be from 1 to 8192, not -64"),
        ({"height": 0}, "height must be from 1"),
        ({"width": 640.7}, "width should be a whole number, not 640.7"),
        ({"sample_steps": True}, "sample_steps should be a whole number, not True"),
        ({"sample_steps": 0}, "sample_steps must be from 1 to 1000, not 0"),
        ({"scale": "NaN"}, "scale must be from 0 to 1000, not nan"),
        ({"guidance_scale": -1}, "guidance_scale must be from 0"),
        ({"flow_shift": "inf"}, "flow_shift must be from 0 to 1000, not inf"),
        ({"seed": "inf"}, "seed should be a whole number"),
        ({"seed": "1_0"}, "seed should be a whole number, not '1_0'"),
        ({"scale": 1e20}, "scale must be from 0 to 1000, not 1e+20"),
        ({"flow_shift": 0}, "flow_shift 0"),
        ({"prompt": float("nan")}, "prompt should be text, not nan"),
        ({"negative_prompt": float("inf")}, "negative_prompt should be text, not inf"),
        ({"negative_prompt": ["a"]}, "negative_prompt should be text"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(tmp_path, values, words):
    path = write(tmp_path, "p.json", json.dumps([{"prompt": "a", **values}]))
    with pytest.raises(ConfigError) as caught:
        prompts.read_prompts(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("line", ["a --w 0", "a --h 0", "a --s 0"])
def test_sizes_and_steps_of_zero_are_refused_in_lines(tmp_path, line):
    with pytest.raises(ConfigError, match="line 1"):
        prompts.read_prompts(write(tmp_path, "p.txt", line))


def test_toml_shares_what_stands_in_prompt(tmp_path):
    path = write(
        tmp_path,
        "p.toml",
        '[prompt]\nwidth = 640\n[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nprompt = "b"\nseed = 3\n',
    )
    read = prompts.read_prompts(path)
    assert [(p.prompt, p.width, p.seed) for p in read] == [("a", 640, None), ("b", 640, 3)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "a --d -1"),
        ("p.json", '["a --d -1"]'),
        ("p.json", '[{"prompt": "a", "seed": -1}]'),
        ("p.toml", '[[prompt.subset]]\nprompt = "a"\nseed = -1\n'),
    ],
)
def test_a_seed_of_minus_one_is_none_as_in_other_programs(tmp_path, name, text):
    path = write(tmp_path, name, text)
    (read,) = prompts.read_prompts(path)
    assert read.seed is None and not prompt_checks.notes(path)
    (row,) = prompt_rows.prompt_rows_of_file(path)
    assert "seed" not in row and prompt_rows.rows_as_text([{"prompt": "a", "seed": "-1"}]) == "a --d -1\n"
    assert prompts.parse_line("a --d -12").seed is None and prompts.parse_line("a --d -1 --w 64").width == 64


def test_json_takes_texts_and_objects(tmp_path):
    path = write(tmp_path, "p.json", json.dumps(["a cat --d 4", {"prompt": "b", "scale": 2}]))
    assert [(p.prompt, p.seed, p.scale) for p in prompts.read_prompts(path)] == [("a cat", 4, None), ("b", None, 2.0)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "a --w 9000\n#\nb --d 99999999999999999999\n", ["line 1", "width", "line 3", "seed"]),
        ("p.json", '["a --h 9999", {"prompt": "b", "sample_steps": 0}]', ["entry 1", "height", "entry 2", "steps"]),
        ("p.txt", "\n# nothing\n", ["no prompt"]),
        ("p.json", "{", ["JSON"]),
        ("p.json", '[{"prompt": "a", "widht": 3}]', ["widht"]),
        ("p.toml", "[prompt]\nwidth=1\n[[prompt.subset]]\nwidth=2\nprompt='a'\n", ["width", "subset 1"]),
    ],
)
def test_every_mistake_is_named_at_once(tmp_path, name, text, words):
    with pytest.raises(ConfigError) as caught:
        prompts.read_prompts(write(tmp_path, name, text))
    for word in words:
        assert word in str(caught.value)


def test_images_that_a_model_is_shown_are_named_once_or_several_times(tmp_path):
    line = "a cat --ci a b.png --w 64 --ci c.png --cim m.png --zz 1"
    read = prompts.parse_line(line)
    assert (read.control_image_path, read.control_image_mask_path) == (("a b.png", "c.png"), "m.png")
    (tmp_path / "p.json").write_text(
        '[{"prompt": "a", "control_image_path": ["a.png", "b.png"]}, {"prompt": "b", "control_image_path": "c.png"}]'
    )
    assert [problem.control_image_path for problem in prompts.read_prompts(tmp_path / "p.json")] == [
        ("a.png", "b.png"),
        ("c.png",),
    ]
    (tmp_path / "p.txt").write_text(line)
    (row,) = prompt_rows.prompt_rows_of_file(tmp_path / "p.txt")  # which has no fields for them, and keeps them
    assert prompts.parse_line(prompt_rows.prompt_line(row)) == read and prompt_rows.prompt_line(row).endswith(" --zz 1")
    use = ControlUse(least=1, most=1)
    shown = prompt_checks.notes(tmp_path / "p.txt", PromptUse(use))
    assert len(prompt_checks.notes(tmp_path / "p.txt")) == 4 and len(shown) == 3
    assert "--ci c.png is ignored: this model takes at most 1 of them" in str(shown[0])
    for shown, missing in (
        (ControlUse(), ()),
        (use, ("a b.png",)),
        (ControlUse(most=3), ("a b.png", "c.png")),
        (ControlUse(inpaints=True), ("a b.png", "m.png")),
    ):
        said = prompt_checks.unreadable(tmp_path / "p.txt", shown, lambda path: "")
        assert [str(problem).rpartition(": ")[2] for problem in said] == list(missing)  # those alone that it is shown
    (tmp_path / "d.txt").write_text(f"a --ci {tmp_path / 'p.txt'}")
    (said,) = prompt_checks.unreadable(tmp_path / "d.txt", use, lambda path: "it is text")
    assert "names an image that cannot be read" in str(said) and "(it is text)" in str(said)


NUMBERS = [name for name, (field, *_) in prompts.LETTERS.items() if prompts.FIELD_TYPES.get(field) in (int, float)]
ODD = ("nan", "inf", "-inf", "-1", "-0", "1e999", "1e-3", "", "true", "1_000", "0x10", "+5", "..", "1.2.3", "1,5")


# Options of a prompt, the option of a config for all prompts, and a scale.
BY_MODEL = {"--g 3": "sample_guidance_scale", "--ss euler_a": "sample_sampler", "--fs 3": "sample_shift"}


@pytest.mark.parametrize("script", [*LORAS, "sdxl_train_control_net_lllite", "sdxl_train_textual_inversion"])
def test_what_a_model_does_not_follow_is_named_as_in_its_options(shallow, tmp_path, script):  # noqa: F811
    config = config_of(shallow, script, sample_prompts=write(tmp_path, "p.txt", f"a {' '.join(BY_MODEL)} --w 64"))
    idle = {name for name in BY_MODEL.values() if name in ineffective.ineffective_options(config)}
    said = "\n".join(map(str, sample_prompts.idle_prompts(config, families.family_for(config))))
    assert {option for letter, option in BY_MODEL.items() if f"{letter} is ignored: " in said} == idle
    assert "None" not in said and (idle or "flux" in script)


@pytest.mark.parametrize("script", LORAS)
def test_a_negative_prompt_without_guidance_is_named(shallow, tmp_path, script):  # noqa: F811
    path, family = tmp_path / "p.toml", families.family_for(config_of(shallow, script))
    for scale in (None, 0, 0.5, 1, 1.5, 4):
        line = '[[prompt.subset]]\nprompt = "a"\nnegative_prompt = "ugly"\n'
        path.write_text(line + ("" if scale is None else f"scale = {scale}\n"), encoding="utf-8")
        for of_all in (None, 1.0, 4.0):
            config = config_of(shallow, script, sample_prompts=path, sample_every_n_steps=1, sample_scale=of_all)
            notes = [str(note) for note in sample_prompts.idle_prompts(config, family)]
            used = next(one for one in (scale, of_all, family.sample_defaults.get("scale", 1)) if one is not None)
            guided = prompt_use.idle_sampler(family).is_guided(SampleRequest("a", scale=used))
            assert len(notes) == (not guided) and all("negative_prompt = ugly is ignored" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.json", '[{"prompt": "a --w 640"}]', "--w is read as part of the text: write width beside it"),
        ("p.toml", '[prompt]\nnegative_prompt = "b --S 4"\n[[prompt.subset]]\nprompt = "a"', "write sample_steps"),
    ],
)
def test_options_of_a_line_in_a_text_of_json_or_toml_are_named(tmp_path, name, text, says):
    (note,) = prompt_checks.notes(write(tmp_path, name, text))
    assert says in str(note)


def test_what_stands_outside_of_the_prompts_in_toml_is_refused(tmp_path):
    path = write(tmp_path, "p.toml", 'width = 640\nseed = 3\n[[prompt.subset]]\nprompt = "a"\n[more]\n')
    with pytest.raises(ConfigError, match=r"p.toml, width, seed, more: only \[prompt\] is read; move it there"):
        prompts.read_prompts(path)


@pytest.mark.parametrize(("value", "says"), [("[1, null]", "should be text"), ("64.5", "should be a whole number")])
def test_values_of_another_kind_are_refused(tmp_path, value, says):
    field = "control_image_path" if "[" in value else "width"
    with pytest.raises(ConfigError, match=f"{field} {says}"):
        prompts.read_prompts(write(tmp_path, "p.json", f'[{{"prompt": "a", "{field}": {value}}}]'))


@pytest.mark.parametrize("letter", NUMBERS)
def test_no_odd_number_is_taken_in_silence(tmp_path, letter):
    """In a line it is named or refused; in JSON and TOML refused."""
    field = prompts.LETTERS[letter][0]
    for value in ODD:
        if letter == "d" and value == "-1":  # a random seed
            continue
        path = write(tmp_path, "p.txt", f"cat --{letter} {value}")
        try:
            prompts.read_prompts(path)
        except ConfigError:
            continue
        assert prompt_checks.notes(path), (letter, value)
    for value in ("nan", "inf", "-inf", "true", "[1]", '"x"', '"1_0"', '""'):
        path = write(tmp_path, "p.toml", f'[[prompt.subset]]\nprompt = "a"\n{field} = {value}\n')
        with pytest.raises(ConfigError, match=field):
            prompts.read_prompts(path)
        of_json = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(value, value)
        path = write(tmp_path, "p.json", f'[{{"prompt": "a", "{field}": {of_json}}}]')
        with pytest.raises(ConfigError, match=field):
            prompts.read_prompts(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", "a cat --w 100 --h 64"),
        ("p.json", '["a cat --w 100 --h 64"]'),
        ("p.json", '[{"prompt": "a cat", "width": 100, "height": 64}]'),
        ("p.toml", '[prompt]\nwidth = 100\n[[prompt.subset]]\nprompt = "a cat"\nheight = 64\n'),
    ],
)
def test_a_size_that_is_rounded_is_reported(tmp_path, name, text):
    (said,) = prompt_checks.notes(write(tmp_path, name, text), PromptUse(multiple=16))
    assert "100 becomes 96, as sides are multiples of 16 here" in str(said)
    assert not prompt_checks.notes(tmp_path / name, PromptUse(multiple=4))
    (small,) = prompt_checks.line_notes("a --w 5 --h 128", PromptUse(multiple=16))
    assert str(small) == "prompt: --w 5 becomes 64, the shortest side of an image"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "# nothing", "p.txt holds no prompt; write one per line"),
        ("p.json", "[]", "p.json holds no prompt; write a list of texts or of objects"),
        ("p.json", '["a", " "]', "p.json, entry 2 has no prompt"),
        ("p.toml", '[prompt]\nprompt = "a"\n', "p.toml holds no prompt; write each as a table, [[prompt.subset]]"),
        ("p.toml", '[[prompt]]\nprompt = "a"\n', "p.toml holds no prompt; write each as a table, [[prompt.subset]]"),
    ],
)
def test_a_file_without_a_prompt_says_how_its_format_has_one(tmp_path, name, text, says):
    with pytest.raises(ConfigError) as error:
        prompts.read_prompts(write(tmp_path, name, text))
    assert str(error.value) == f"sample_prompts: {says}"


LONG_PROMPTS = {
    "options": ("p.txt", "a" + " --w 64" * 100_000, "p.txt, line 1 has 100,000 options, and a prompt has at most 200"),
    "names": ("p.txt", "a" + " --zz 1" * 201, "p.txt, line 1 has 201 options"),
    "letters": ("p.txt", "#\n" + "a" * 20_001, "p.txt, line 2 has 20,001 characters, and a prompt has at most 20000"),
    "text in a list": ("p.json", json.dumps(["a" + " --d 1" * 201]), "p.json, entry 1 has 201 options"),
    "references": (
        "p.json",
        json.dumps([{"prompt": "a", "control_image_path": ["x.png"] * 500}]),
        "p.json, entry 1 has 501 options",
    ),
    "keys": ("p.toml", "[[prompt.subset]]\n" + "".join(f"k{i} = 1\n" for i in range(300)), "subset 1 has 300 options"),
    "prompts": ("p.txt", "a\n" * 10_001, "p.txt holds 10,001 prompts, and at most 10000 are read"),
}


@pytest.mark.parametrize("what", LONG_PROMPTS)
def test_more_than_a_prompt_can_have_is_one_sentence(tmp_path, what):
    name, text, said = LONG_PROMPTS[what]
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError) as found:
        prompts.read_prompts(path)
    assert said in str(found.value) and len(found.value.problems) == 1 and len(str(found.value)) < 200
    with pytest.raises(ConfigError, match="has at most|are read"):
        prompt_rows.prompt_rows_of_file(path)
    if what in ("options", "letters"):
        (line,) = [line for _, line in prompts.prompt_lines(text)]
        with pytest.raises(ConfigError, match=r"row 1: has .*, and a prompt has at most"):
            prompt_rows.rows_as_text([{"prompt": line}])


def test_as_much_as_a_prompt_can_have_is_read(tmp_path):
    (read,) = prompts.read_prompts(write(tmp_path, "p.txt", "a" + " --ci x.png" * 200))
    assert len(read.control_image_path) == 200
    assert len(prompts.read_prompts(write(tmp_path, "q.txt", "a\n" * 10_000))) == 10_000
