"""The contract of families and every room of the project with the toy, in a copy of the tree that has it: run by
test_toy.py, and not by itself."""

import json

import pytest

from library.config.building import draft
from library.families import config_class, facts_of
from tests.contract.test_data_options import *  # noqa: F403
from tests.contract.test_family import *  # noqa: F403 - the contract, for the models of this `demo`
from tests.contract.test_saving_and_stopping import *  # noqa: F403
from tests.training import config_of, pictures, shapes, squares, train  # noqa: F401

LORA, FULL = facts_of("toy").scripts


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    from library.demo import files

    return files.prepare_demo(tmp_path_factory.mktemp("demo") / "demo", ("toy",))


def trained(demo, data, script, folder, **values):  # noqa: F811
    return train(config_of(demo, script, train_data_dir=data, output_dir=folder, **values))


def test_the_page_opens_with_its_form():
    from kohya_gui.app import build_page
    from kohya_gui.form.sections import visibility
    from kohya_gui.form.tabs import FAMILY_TITLES

    assert FAMILY_TITLES["toy"] == "Toy" and ".only-toy" in visibility(FAMILY_TITLES)
    markup = build_page().training.tabs["lora"].markup
    assert 'name="family" value="toy"' in markup and "Toy" in markup


def test_the_outlook_on_compiling_knows_it():
    from kohya_gui.form import compile_summary

    assert "1 graph, about 5 s" in str(compile_summary.outlook(draft(config_class(LORA), {"compile": True})))


def test_a_toy_training_is_checked_and_estimated(demo, squares, tmp_path, capsys):  # noqa: F811
    from library.cli import check

    flags = ["--train_data_dir", str(squares), "--output_dir", str(tmp_path), "--json"]
    assert check.main([LORA, "--config_file", str(demo.configs[LORA]), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "bad" not in {finding["verdict"] for finding in report["findings"]} and report["fit"]["peak"] > 0


def test_another_familys_file_is_named(demo, tmp_path):
    from library import families
    from library.families.recognition import recognise_file
    from library.families.sdxl import random

    sdxl = random.write_random_model(tmp_path)
    assert recognise_file(demo.models["toy"]["toy"])[:2] == ("toy", "a toy checkpoint")
    (problem,) = families.family_for(config_of(demo, LORA, pretrained_model_name_or_path=sdxl)).problems()
    assert "an SDXL checkpoint, not a toy checkpoint" in str(problem)


@pytest.mark.parametrize("script", [LORA, FULL])
def test_a_toy_training_is_compiled_swapped_and_previewed(demo, squares, tmp_path, script):  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 2 --d 1\n")
    compiled = trained(
        demo,
        squares,
        script,
        tmp_path / "out",
        compile=True,
        compile_backend="eager",
        blocks_to_swap=1,
        gradient_checkpointing=True,
        sample_prompts=prompts,
        sample_every_n_steps=4,
    )
    eager = trained(demo, squares, script, tmp_path / "eager")
    assert compiled.facts["compile"]["num_graphs"] >= 1
    assert compiled.facts["compile"]["fallback"] in (None, "", False)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    assert len(list((tmp_path / "out" / "sample").glob("*.png"))) == 1


def test_its_lora_is_merged_converted_and_verified(demo, squares, tmp_path):  # noqa: F811
    from safetensors.torch import load_file

    from library.adapter_files import verify
    from library.tools import convert, merge

    lora_run = trained(demo, squares, LORA, tmp_path / "out", learning_rate=1e-2)
    base = demo.models["toy"]["toy"]
    merged = merge.merge_into_checkpoint(base, [(lora_run.file, 1.0)], tmp_path / "merged.safetensors")
    before, after = load_file(base), load_file(merged.path)
    assert before.keys() == after.keys() and merged.modules > 0
    assert {name for name in before if not before[name].equal(after[name])} >= {"toy.blocks.0.qkv.weight"}
    assert not verify.verify_lora(lora_run.file, base).problems
    converted = convert.convert_lora(lora_run.file, tmp_path / "converted.safetensors", to="diffusers")
    assert "transformer.blocks.0.qkv.lora_A.weight" in load_file(converted)


def test_kohya_bench_times_its_steps(tmp_path, monkeypatch):
    from library.bench import shell
    from library.cli.launch import script_of_toml

    flags = ["--size", "tiny", "--part", "step", "--candidate", "eager", "--resolution", "64", "--device", "cpu"]
    out = tmp_path / "bench"
    assert (
        shell.main(["--family", "toy", *flags, "--steps", "2", "--warmup", "1", "--out", str(out)], script_of_toml) == 0
    )
    assert json.loads(next(out.rglob("result.json")).read_text())["results"][0]["status"] == "ok"
