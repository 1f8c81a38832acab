"""Captions of many lengths, at many sizes: one graph for each kind of block, made once, and the numbers of eager
code."""

import numpy as np
import pytest
from PIL import Image

from library import families
from library.config.schema import options_of
from library.demo import files
from tests.training import ONE_ADAPTER, config_of, references, train

SIDES = [(64, 64), (64, 80), (80, 64), (48, 96), (96, 48), (80, 80), (48, 112), (112, 48)]
WORDS = (1, 12, 30, 70, 140)
BUCKETS = {"resolution": "80", "min_bucket_reso": 16, "bucket_reso_steps": 16, "bucket_no_upscale": True}
GRID = {"resolution": "160", "min_bucket_reso": 64, "bucket_reso_steps": 64, "bucket_no_upscale": True}


def written(folder, sides):
    """Pictures of these sizes, of one colour each, with captions of five lengths."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sides):
        colour = np.random.default_rng(number).integers(0, 255, 3)
        Image.new("RGB", size, tuple(map(int, colour))).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text("red " * WORDS[number % len(WORDS)], encoding="utf-8")


def losses_and_graphs(demo, script, folder, options, backend):
    """The losses of a training without compiling and with it, and what the second says of its graphs."""
    options = {"network_args": ONE_ADAPTER, **options}
    eager = train(config_of(demo, script, output_dir=folder / "eager", **options))
    changes = {"compile": True, "compile_backend": backend, "compile_fullgraph": True}
    compiled = train(config_of(demo, script, output_dir=folder / "compiled", **options, **changes))
    assert len(set(eager.losses)) == options["max_train_steps"]
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    return compiled.facts["compile"]


@pytest.mark.parametrize(
    ("script", "cached", "graphs"),
    [
        ("krea_2_train_network", True, 3),
        ("qwen_image_21_train_network", True, 1),
        ("qwen_image_train_network", False, 1),
        ("zimage_train_network", False, 3),
        ("flux_2_train_network", True, 2),
        ("flux_3_train_network", False, 3),
        ("anima_train_network", False, 2),
    ],
)
def test_sizes_and_lengths_are_one_graph_for_each_kind_of_block(demo, tmp_path, script, cached, graphs):
    """The backward pass is traced of the last kind, of which the model has the most blocks."""
    written(tmp_path / "set" / "1_zorb toy", SIDES)
    options = {"train_data_dir": tmp_path / "set", "max_train_steps": len(SIDES), "train_batch_size": 1, **BUCKETS}
    options |= {"cache_text_encoder_outputs": cached, "enable_bucket": True}
    *others, last = families.config_class(script)().compile.kinds
    blocks = ",".join([*(f"{kind}:all=eager" for kind in others), f"{last}:all"])
    told = losses_and_graphs(demo, script, tmp_path, options | {"compile_blocks": blocks}, "aot_eager")
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0
    assert told["num_graphs"] == graphs


@pytest.mark.parametrize("relative", [name for known in families.all_families() for name in known.demo_variants])
def test_relatives_need_their_familys_graphs_for_five_sizes_and_lengths(tmp_path, relative):
    """One for a kind of block; a reference image is of its image's size.

    Its blocks are those of its family, whose other kinds and backward passes are traced elsewhere.
    """
    demo = files.prepare_demo(tmp_path / "demo", (relative,), compiled=True)
    written(tmp_path / "set" / "1_zorb toy", [(64, 64), (64, 128), (128, 64), (64, 192), (192, 64)])
    options = {"train_data_dir": tmp_path / "set", "max_train_steps": 5, "train_batch_size": 1, "enable_bucket": True}
    family = families.owner(relative)
    script = f"{relative}_{families.lora_script(family)}"
    *_, last = families.config_class(families.lora_script(family))().compile.kinds
    options |= {**GRID, "cache_text_encoder_outputs": True, "compile_blocks": f"{last}:all"}
    if "t5xxl_max_token_length" in options_of(families.config_class(families.lora_script(family))):
        options["t5xxl_max_token_length"] = 192
    shown = config_of(demo, script).control_images
    options |= {"control_directory": references(tmp_path / "set", tmp_path)} if shown.least else {}
    options |= {"random_masks": 2} if shown.inpaints else {}
    told = losses_and_graphs(demo, script, tmp_path, options, "eager")
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0
    assert told["num_graphs"] == 1
