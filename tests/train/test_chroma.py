"""Chroma through whole trainings: LoRA, LyCORIS and the whole model, and what is done with their files."""

import pytest
import torch
from safetensors.torch import load_file

from library.adapter_files import verify
from library.demo import files, summary
from library.tools import convert, extract, merge, metadata, resize
from tests.training import config_of, train

LORA, FULL = "chroma_flux_train_network", "chroma_flux_train"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return files.prepare_demo(tmp_path_factory.mktemp("chroma") / "demo", ("chroma",))


@pytest.fixture(scope="module")
def learnt(demo, squares, tmp_path_factory):
    """A LoRA, with previews and a state."""
    folder = tmp_path_factory.mktemp("learnt")
    (folder / "prompts.txt").write_text("a red circle --n blurred --w 64 --h 64 --s 2 --d 1\n")
    return train(
        config_of(
            demo,
            LORA,
            train_data_dir=squares,
            output_dir=folder,
            learning_rate=1e-2,
            seed=7,
            sample_prompts=folder / "prompts.txt",
            sample_every_n_steps=4,
        )
    )


def test_its_lora_has_the_names_that_others_load(demo, learnt):
    tensors = learnt.tensors()
    names = {name.split(".")[0] for name in tensors}
    assert len(names) == 2 * 8 + 4 * 2  # attention and MLP of two double blocks, two layers of four single ones
    assert {"lora_unet_double_blocks_0_img_mlp_0", "lora_unet_single_blocks_3_linear2"} <= names
    matched, wrong = summary.check_lora_layers(learnt.file, config_of(demo, LORA))
    assert not wrong and matched == 2 * (6 + 2 + 4) + 4 * (4 + 1)
    assert len(list(learnt.file.parent.glob("sample/*.png"))) == 1
    about = metadata.read_metadata(learnt.file)
    assert about["ss_base_model_version"] == "chroma" and about["modelspec.architecture"] == "chroma/lora"
    assert about["ss_model_type"] == "chroma"


def test_training_goes_on_from_a_file_of_sd_scripts_names_and_compiled_losses_are_the_eager_ones(
    demo, learnt, shapes, tmp_path
):
    """One graph for each kind of block over three sizes, recompiled never; blocks that wait on the host, too."""
    more = {
        "train_data_dir": shapes,
        "network_weights": learnt.file,
        "gradient_checkpointing": True,
        "resolution": "96",
    }
    eager = train(config_of(demo, LORA, output_dir=tmp_path / "eager", **more))
    fast = train(
        config_of(
            demo, LORA, output_dir=tmp_path / "fast", compile=True, compile_backend="eager", blocks_to_swap=2, **more
        )
    )
    assert fast.losses == pytest.approx(eager.losses, rel=1e-4)
    compiled = fast.facts["compile"]
    assert (compiled["num_graphs"], compiled["recompiles"]) == (2, 0) and compiled["fallback"] in (None, "", False)


def test_the_whole_model_learns_but_for_its_approximator(demo, squares, tmp_path):
    base = load_file(demo.models["chroma"]["flux"])
    done = train(
        config_of(
            demo,
            FULL,
            train_data_dir=squares,
            output_dir=tmp_path,
            learning_rate=1e-3,
            max_train_steps=2,
            save_precision="bf16",
        )
    )
    tensors = done.tensors()
    assert tensors.keys() == base.keys()
    same = {name for name in base if torch.equal(tensors[name], base[name])}
    frozen = {name for name in base if name.startswith("distilled_guidance_layer.")}
    assert frozen <= same and len(same - frozen) < 0.2 * len(base)
    assert len(set(done.losses)) == 2


def test_lycoris_learns(demo, squares, tmp_path):
    done = train(
        config_of(
            demo,
            LORA,
            train_data_dir=squares,
            output_dir=tmp_path,
            network_module="lycoris.kohya",
            network_args=["algo=lokr"],
            max_train_steps=2,
        )
    )
    assert any("single_blocks_0_linear1" in name for name in done.tensors())
    assert not any("distilled_guidance" in name for name in done.tensors())


def test_8_bit_bases(demo, squares, tmp_path):
    for number, options in enumerate(({"fp8_base": True}, {"int8_base": True})):
        done = train(
            config_of(
                demo,
                LORA,
                train_data_dir=squares,
                output_dir=tmp_path / str(number),
                mixed_precision="bf16",
                max_train_steps=2,
                **options,
            )
        )
        assert len(done.losses) == 2 and all(0 < loss < 100 for loss in done.losses)


def test_tools_work_on_its_files(demo, learnt, tmp_path):
    base = demo.models["chroma"]["flux"]
    merged = merge.merge_into_checkpoint(base, [(learnt.file, 1.0)], tmp_path / "merged.safetensors")
    assert merged.modules == 24 and not verify.verify_lora(learnt.file, base).problems
    before, after = load_file(base), load_file(merged.path)
    assert before.keys() == after.keys()
    extracted = extract.extract_lora(merged.path, base, tmp_path / "extracted.safetensors")
    assert metadata.read_metadata(extracted.path)["ss_base_model_version"] == "chroma"
    small = resize.resize_lora(learnt.file, tmp_path / "small.safetensors", choices=resize.ResizeOptions(rank=2))
    assert {new for _, new in small.ranks.values()} == {2}
    there = convert.convert_lora(learnt.file, tmp_path / "there.safetensors", to="diffusers")
    assert "transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight" in load_file(there)
    back = convert.convert_lora(there, tmp_path / "back.safetensors", to="kohya")
    assert load_file(back).keys() == learnt.tensors().keys()
