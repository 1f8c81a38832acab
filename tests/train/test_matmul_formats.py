"""Which numbers matrices are multiplied in is decided by timing, remembered, and kept by a training that continues."""

import pytest
import torch

from library import families
from library.bench import subjects
from library.measuring import stored_results
from library.memory.quantization import fp8_matmul, int8_matmul
from library.train.compiling import matmul_formats
from tests.training import config_of, train

COMPILED = {"mixed_precision": "bf16", "compile": True, "compile_backend": "eager", "compile_blocks": "single:0"}
SIZE = matmul_formats.Size(32, 64, 48)


@pytest.fixture
def start(demo, squares, tmp_path, monkeypatch):  # noqa: F811
    """Train with times that are made up; what was timed is in `start.asked`."""
    monkeypatch.setattr(stored_results, "results_folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(int8_matmul, "supports_int8", lambda device: True)
    numbers = iter(range(100))

    def begin(times=None, script="flux_train_network", **values):
        def time_formats(sizes, formats, device, dtype, kept, passes):
            begin.asked.append((sizes, [*formats], kept, passes))
            return {matmul_formats.IN_16_BITS: 1.0} | times

        monkeypatch.setattr(matmul_formats, "time_formats", time_formats)
        options = {"max_train_steps": 2, "output_dir": tmp_path / f"run{next(numbers)}", "auto_compute": True}
        return train(config_of(demo, script, train_data_dir=squares, **COMPILED | options | values))

    begin.asked = []
    return begin


def said(outcome):
    lines = (outcome.folder / "log.txt").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("Matrix products")]
    return line


def test_the_fastest_is_used_remembered_and_kept_by_a_resumed_training(start, demo, squares, tmp_path):
    outcome = start({"int8": 0.5}, save_state=True, gradient_checkpointing=True)
    assert "as a share of the time in 16 bits: int8 0.50; int8 is used (" in said(outcome)
    ((sizes, formats, base_format, passes),) = start.asked
    assert (formats, base_format, passes) == (["int8"], "", 2)
    tokens = {size.tokens for size in sizes}
    images = min(tokens) // 16  # of a batch: 64 x 64 pixels are 16 tokens, and the text has 32
    assert tokens == {16 * images, 32 * images, 48 * images}
    asked = {"int8_base": True, "int8_compute": True, "auto_compute": False, "gradient_checkpointing": True}
    assert start(**asked).losses == outcome.losses
    again = start({"int8": 2.0}, gradient_checkpointing=True)
    assert len(start.asked) == 1 and again.losses == outcome.losses and "int8 is used (remembered)" in said(again)
    (state,) = outcome.file.parent.glob("*-state")
    values = {"resume": state, "max_train_steps": 3, "gradient_checkpointing": True}
    for file in (tmp_path / "tuning").iterdir():
        file.unlink()
    resumed = start({"int8": 2.0}, **values)
    assert len(start.asked) == 1 and said(resumed) == "Matrix products: int8, as in the training that is resumed."
    assert not [line for line in resumed.events("warning") if "not bit-exactly" in line["text"]]


def test_sixteen_bits_stay_where_eight_gain_little(start):
    outcome = start({"int8": 0.97}, script="sdxl_train_network", compile_blocks="transformer:0", fp8_base=True)
    assert "16 bits is used" in said(outcome) and start.asked[0][2] == "fp8"


def test_a_machine_without_such_products_says_so_in_a_line(start, monkeypatch):
    monkeypatch.setattr(int8_matmul, "supports_int8", lambda device: False)
    outcome = start({})
    assert not start.asked and "computed in 16 bits: this machine cannot multiply in 8 bits." in said(outcome)
    assert outcome.losses == start(auto_compute=False).losses


def test_without_compiling_eight_bits_are_not_timed(start):
    assert "in 16 bits: without compile, rounding to 8 bits takes longer" in said(
        start({}, compile=False, compile_blocks=None)
    )
    assert not start.asked


def test_formats_are_timed_by_computing_products_and_those_that_fail_are_left_out(monkeypatch):
    cpu, sizes = torch.device("cpu"), matmul_formats.Sizes({SIZE: 3})
    for name, base_format in ((matmul_formats.IN_16_BITS, ""), (matmul_formats.IN_16_BITS, "fp8"), ("int8", "")):
        forward, backward = matmul_formats.calls(SIZE, name, cpu, torch.float32, base_format)
        assert (forward().shape, backward().shape) == ((32, 48), (32, 64))
    real = matmul_formats.calls

    def failing(size, name, *how):
        if name == "fp8":
            raise RuntimeError("no such kernel")
        return real(size, name, *how)

    monkeypatch.setattr(matmul_formats, "calls", failing)
    seconds = matmul_formats.time_formats(sizes, ["fp8", "int8"], cpu, torch.float32, "", 1)
    assert seconds.keys() == {matmul_formats.IN_16_BITS, "int8"} and min(seconds.values()) > 0


@pytest.mark.gpu
def test_a_gpu_times_all_of_its_formats_within_seconds():
    device, sizes = torch.device("cuda"), matmul_formats.Sizes({matmul_formats.Size(4608, 3072, 9216): 2, SIZE: 1})
    works = {"fp8": fp8_matmul.supports_fp8(device), "int8": int8_matmul.supports_int8(device)}
    formats = [name for name, yes in works.items() if yes]
    seconds = matmul_formats.time_formats(sizes, formats, device, torch.bfloat16, "", 1)
    assert seconds.keys() == {matmul_formats.IN_16_BITS, *formats} and min(seconds.values()) > 0


def test_the_choice_is_reported_with_its_numbers():
    seconds = {matmul_formats.IN_16_BITS: 2.0, "fp8": 1.62, "int8": 2.2}
    assert (
        matmul_formats.fastest_format(seconds) == "fp8"
        and matmul_formats.fastest_format({}) == matmul_formats.IN_16_BITS
    )
    assert matmul_formats.choice_sentence(seconds, "fp8", "remembered") == (
        "Matrix products, as a share of the time in 16 bits: fp8 0.81, int8 1.10; fp8 is used (remembered)."
    )


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_sizes_of_every_familys_matrices_are_found(family):
    """From random text outputs in its own shapes, which a benchmark's steps are given as well."""
    subject = subjects.FamilySubject(families.lora_script(family), {"mixed_precision": "no"}, "tiny")
    device, config = torch.device("cpu"), subject.config({})
    trainable = subject.make(config, device)
    answer = subject.predict(trainable, 64, device)(trainable.components.denoiser)
    assert answer.shape[-2:] == (8, 8) and answer.isfinite().all()
    side = 16 if family == "sd15" else 8  # its U-Net halves latents three times
    sizes = matmul_formats.matrix_sizes(config, trainable.family, trainable.components.denoiser, (1, side, side))
    assert sizes and all(size.tokens > 1 for size in sizes)
