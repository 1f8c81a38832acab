"""Full fine-tunes whose model is in shards: two processes, each with a part, against the same two with whole models."""

import json

import pytest
import torch
from safetensors import safe_open

from library.check.estimate import estimate
from library.cli import train_script
from library.config.building import build_config
from library.config.command import training_command
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.demo import files
from library.families import config_class
from library.optim import optimizers
from tests import fork_server
from tests.training import Outcome, config_of, free_port, problems_and_remarks, ranks, runs_in, train

FLUX = {"train_batch_size": 1, "learning_rate": 1e-3, "max_train_steps": 3, "seed": 4, "output_name": "m"}
KEPT = {"gradient_accumulation_steps": 2, "save_every_n_steps": 2, "save_state": True, "ema_decay": 0.9}
HALF = {"full_bf16": True, "mixed_precision": "bf16", "gradient_checkpointing": True, "save_precision": "bf16"}
STATE = "m-step00000002-state"


class Trainings:
    """Trainings of several processes, by name."""

    def __init__(self, demo, images, folder):
        self.demo, self.images, self.folder = demo, images, folder

    def config(self, name, script="flux_train", **values):
        options = FLUX | {"train_data_dir": self.images, "output_dir": self.folder / name} | values
        return config_of(self.demo, script, **options)

    def run(self, number=2, **cases):
        """Each case is a script and what it is told, one after the other in the same processes."""
        jobs = []
        for name, (script, values) in cases.items():
            toml = self.folder / f"{name}.toml"
            toml.write_text(to_toml(self.config(name, script, **values)), encoding="utf-8")
            jobs += [script.removeprefix("chroma_"), toml, free_port()]
        for process in ranks(["-m", "tests.several_trainings", *jobs], number):
            said = process.communicate(timeout=600)[0]
            assert process.returncode == 0, said

    def state(self, name):
        return self.folder / name / STATE

    def __getitem__(self, name):
        (folder,) = runs_in(self.folder / name)
        return Outcome(self.folder / name / "m.safetensors", folder)


@pytest.fixture(scope="module")
def trained(demo, squares, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    (folder / "prompts.txt").write_text("one --w 64 --h 64 --s 1 --d 1\ntwo --w 64 --h 64 --s 2 --d 2\nthree --s 1\n")
    trainings = Trainings(demo, squares, folder)
    sampled = {"sample_prompts": folder / "prompts.txt", "sample_every_n_steps": 3}
    cases = {
        "shards": ("flux_train", {**KEPT, **sampled, "fsdp": True}),
        "again": ("flux_train", {**KEPT, "fsdp": True, "resume": folder / "shards" / STATE}),
        "halfwhole": ("flux_train", HALF),
        "halfshards": ("flux_train", {**HALF, "fsdp": True}),
        "compiled": ("flux_train", {**KEPT, "fsdp": True, "compile": True, "compile_backend": "eager"}),
    }
    trainings.run(**cases)
    return trainings


def same_files(one, other):
    """Whether two files have the same names, shapes, types, metadata."""
    with safe_open(one, framework="pt") as first, safe_open(other, framework="pt") as second:
        assert [*first.keys()] == [*second.keys()]
        abouts = [{k: v for k, v in (file.metadata() or {}).items() if "time" not in k} for file in (first, second)]
        assert {k for k in abouts[0] if abouts[0][k] != abouts[1].get(k)} <= {"ss_session_id", "modelspec.date"}
        for name in first.keys():  # noqa: SIM118 - no mapping
            a, b = first.get_tensor(name), second.get_tensor(name)
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            yield a.float(), b.float()


def test_losses_and_files_are_those_of_whole_models(trained):
    trained.run(whole=("flux_train", KEPT))
    whole, shards = trained["whole"], trained["shards"]
    assert shards.losses[0] == whole.losses[0]
    assert shards.losses == pytest.approx(whole.losses, rel=1e-6)
    assert shards.numbers("grad_norm") == pytest.approx(whole.numbers("grad_norm"), rel=1e-5)
    names = {path.name for path in whole.file.parent.iterdir()}
    assert {path.name for path in shards.file.parent.iterdir()} == names | {"sample"}
    for name in (whole.file.name, "m-step00000002.safetensors", "m-ema.safetensors"):
        for a, b in same_files(whole.file.with_name(name), shards.file.with_name(name)):
            assert torch.allclose(a, b, atol=1e-5), name
    assert len(list((shards.file.parent / "sample").iterdir())) == 3


def test_a_resumed_training_goes_on_bit_for_bit(trained):
    assert trained["again"].losses == trained["shards"].losses[2:]
    assert all(torch.equal(a, b) for a, b in same_files(trained["shards"].file, trained["again"].file))


def test_weights_in_half_precision_are_rounded_as_in_whole_models(trained):
    whole, shards = trained["halfwhole"], trained["halfshards"]
    assert shards.losses == pytest.approx(whole.losses, rel=1e-3)
    pairs = [*same_files(whole.file, shards.file)]
    assert sum(int((a == b).sum()) for a, b in pairs) > 0.6 * sum(a.numel() for a, _ in pairs)


def test_compiled_blocks_give_the_same_losses(trained):
    compiled = trained["compiled"]
    assert compiled.losses == pytest.approx(trained["shards"].losses, rel=1e-5)
    assert compiled.facts["compile"]["graphs"] == {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}


def test_a_state_goes_on_with_other_numbers_of_processes(trained):
    """From one process to two, and from two to one and to three."""
    train(trained.config("one", **KEPT, train_batch_size=2))
    trained.run(fromone=("flux_train", {**KEPT, "fsdp": True, "resume": trained.state("one")}))
    first, two = trained["one"], trained["fromone"]
    assert two.losses == pytest.approx(first.losses[2:], rel=1e-4)
    state = trained.state("shards")
    alone = trained.config("alone", **KEPT | {"save_state": False}, train_batch_size=2, resume=state)
    assert train(alone).losses == pytest.approx(trained["shards"].losses[2:], rel=1e-4)
    told = {**KEPT, "resume": state, "max_train_steps": 3, "save_every_n_steps": None}
    trained.run(3, whole3=("flux_train", told), shards3=("flux_train", {**told, "fsdp": True}))
    assert trained["shards3"].losses == pytest.approx(trained["whole3"].losses, rel=1e-5)
    for a, b in same_files(trained["whole3"].file, trained["shards3"].file):
        assert torch.allclose(a, b, atol=1e-5)


def test_an_sdxl_model_with_text_encoders(demo, squares, tmp_path):
    """Whose encoders every process has whole, and with images that are held back, one more than divides by two."""
    trainings = Trainings(demo, squares, tmp_path)
    (images,) = squares.iterdir()
    told = f'[[datasets]]\nresolution = 64\nvalidation_split = 0.75\n[[datasets.subsets]]\nimage_dir = "{images}"\n'
    (tmp_path / "images.toml").write_text(told, encoding="utf-8")
    values = {"train_text_encoder": True, "cache_text_encoder_outputs": False, "max_train_steps": 2}
    values |= {"dataset_config": tmp_path / "images.toml", "train_data_dir": None}
    trainings.run(
        whole=("sdxl_train", values), shards=("sdxl_train", {**values, "fsdp": True, "mixed_precision": "no"})
    )
    whole, shards = trainings["whole"], trainings["shards"]
    validated = [event["loss"] for event in whole.events("validation")]
    assert [event["loss"] for event in shards.events("validation")] == pytest.approx(validated, rel=1e-4) and validated
    assert shards.losses == pytest.approx(whole.losses, rel=1e-4)
    assert shards.numbers("grad_norm") == pytest.approx(whole.numbers("grad_norm"), rel=1e-4)
    for a, b in same_files(whole.file, shards.file):
        assert torch.allclose(a, b, atol=3e-3)  # at most, where a gradient is as small as what rounding changes


def test_chroma_whose_approximator_stays_unchanged(squares, tmp_path):
    trainings = Trainings(files.prepare_demo(tmp_path / "demo", ("chroma",)), squares, tmp_path)
    name, values = "chroma_flux_train", {"max_train_steps": 2, "max_grad_norm": 1.0}
    trainings.run(whole=(name, values), shards=(name, {**values, "fsdp": True}))
    whole, shards = trainings["whole"], trainings["shards"]
    assert shards.losses == pytest.approx(whole.losses, rel=1e-5)
    for a, b in same_files(whole.file, shards.file):
        assert torch.allclose(a, b, atol=1e-4)


HELD = """
import gc, json, os, sys
import torch
from torch.distributed.tensor import DTensor
from accelerate.state import AcceleratorState
from library.cli.train_script import main
from library.compiler.torch_private import LazyTensor
from library.families import config_class
from library.optim import optimizers
from tests import fork_server
from library.train.step.updates import Updates

def held(parts):
    # Bytes of all tensors but those of networks that do not learn.
    frozen = [network for network in (parts.vae, *parts.encoders.values()) if network is not None]
    others = {tensor.data_ptr() for network in frozen for tensor in network.state_dict().values()}
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, DTensor | LazyTensor)]
    sizes = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors) if s.device.type == "cpu"}
    return sum(size for place, size in sizes.items() if place not in others)

stepped, found = Updates.step, []

def step(self, watched=False):
    answer = stepped(self, watched)
    gc.collect()
    found.append(held(self._method.components))  # weights, gradients and all that the optimizer keeps are there now
    return answer

Updates.step, last = step, []
for toml, port in zip(*[iter(sys.argv[1:])] * 2, strict=True):
    os.environ["MASTER_PORT"] = port
    AcceleratorState._reset_state(True)
    found.clear()
    assert not main(config_class("flux_train"), ["--config_file", toml])
    last.append(found[-1])
print(json.dumps(last), flush=True)
"""


def test_two_processes_hold_little_more_than_half_each(demo, squares, tmp_path):
    trainings = Trainings(demo, squares, tmp_path)
    jobs = []
    for name, fsdp in (("whole", False), ("shards", True)):
        toml = tmp_path / f"{name}.toml"
        toml.write_text(to_toml(trainings.config(name, fsdp=fsdp, max_train_steps=2)), encoding="utf-8")
        jobs += [toml, free_port()]
    for process in ranks(["-c", HELD, *jobs]):
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 0, said
        whole, shards = json.loads(said.splitlines()[-1])
        assert shards < 0.55 * whole, (shards, whole)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"blocks_to_swap": 3}, "blocks_to_swap"),
        ({"fused_backward_pass": True, "optimizer_type": "Adafactor"}, "fused_backward_pass"),
        ({"blockwise_fused_optimizers": True}, "blockwise_fused_optimizers"),
        ({"mixed_precision": "fp16"}, "use bf16"),
        ({"compile": True, "compile_fallback": True}, "compile_fallback"),
        ({"compile": True, "compile_autotune": True}, "compile_autotune"),
        ({"compile": True, "compile_scope": "model"}, "compile_scope = blocks"),
        ({"compile": True, "compile_mode": "reduce-overhead"}, "fsdp .*use default"),
        ({"cuda_graphs": "true"}, "fsdp .*use auto"),
    ],
)
def test_what_shards_cannot_do_is_refused_by_name(values, words):
    with pytest.raises(ConfigError, match=words) as refused:
        build_config(config_class("flux_train"), {"fsdp": True} | values, notes=[])
    assert all("fsdp" in problem for problem in str(refused.value).splitlines())


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("AdamW", True),
        ("Lion", True),
        ("AdamWScheduleFree", True),
        ("torch.optim.RAdam", True),
        ("Adafactor", False),
        ("AdamW8bit", False),
        ("Prodigy", False),
        ("CAME", False),
        ("Muon", False),
        ("torch.optim.LBFGS", False),
    ],
)
def test_optimizers_that_need_whole_weights_are_refused(demo, name, works):
    config = config_of(demo, "flux_train", fsdp=True, optimizer_type=name)
    said = [problem for problem in optimizers.find_optimizer_problems(config) if "fsdp" in str(problem)]
    assert not said if works else "use AdamW" in str(said[0])


def test_adapters_are_not_sharded():
    with pytest.raises(
        ConfigError, match="fsdp is for full fine-tunes, and adapters are too small to shard: leave it out"
    ):
        build_config(config_class("flux_train_network"), {"fsdp": True}, notes=[])


def test_a_config_of_accelerates_shards_as_the_option_does(demo, monkeypatch):
    """With version 2; version 1 and host memory are refused by name."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert train_script.read_command_line(config_class("flux_train"), []).config.distributed.fsdp
    (problem,) = train_script.read_command_line(config_class("flux_train_network"), []).problems
    assert "fsdp" in str(problem) and "MULTI_GPU" in str(problem)
    config = config_of(demo, "flux_train", fsdp=True)
    assert not [p for p in problems_and_remarks(config)[0] if "accelerate" in str(p)]
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert [p for p in problems_and_remarks(config)[0] if "fsdp_offload_params" in str(p)]
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert not train_script.read_command_line(config_class("flux_train"), []).config.distributed.fsdp
    (problem,) = [p for p in problems_and_remarks(config)[0] if "accelerate" in str(p)]
    assert "version 1 of FSDP" in str(problem) and "fsdp = true" in str(problem)


def test_the_estimate_knows_of_shards(demo, monkeypatch):
    whole, shards = (config_of(demo, "flux_train", fsdp=fsdp, **HALF) for fsdp in (False, True))
    alone = estimate(shards, (1024, 1024)).parts
    assert alone == estimate(whole, (1024, 1024)).parts  # with one process it has no effect
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = estimate(shards, (1024, 1024)).parts
    assert parts.get("optimizer", 0) <= alone["optimizer"] / 2 + 0.01
    assert parts.get("activations") == alone.get("activations")


def test_accelerate_launches_it_on_two_machines_by_its_own_options(trained, tmp_path):
    """The launcher's FSDP 2 is ours: the same numbers, and accelerate wraps nothing. Each machine starts a launcher of
    its own; they meet at another address of this machine."""
    config = trained.config("launched", **KEPT, max_train_steps=2, output_dir=tmp_path)
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    asked = ("--use_fsdp", "--fsdp_version", "2")
    how = {"num_processes": 2, "num_machines": 2, "main_process_ip": "127.0.0.2", "main_process_port": free_port()}
    how["extra_accelerate_launch_args"] = asked
    machines = [training_command(tmp_path / "run.toml", "flux_train", machine_rank=rank, **how) for rank in range(2)]
    for launcher in [fork_server.start(arguments[1:]) for arguments in machines]:
        said = launcher.communicate()[0]
        assert launcher.returncode == 0, said
    (folder,) = runs_in(tmp_path)
    launched = Outcome(tmp_path / "m.safetensors", folder)
    assert launched.facts["config"]["distributed"] == {"fsdp": True} and launched.facts["hardware"]["processes"] == 2
    assert launched.losses == trained["shards"].losses[:2]
