"""Compiling beside the run: eager steps first, then compiled ones from the cache, the same again in a resumed run."""

import io
import json
import queue
import re
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from library import families
from library.compiler import block_calls, cudagraph, graph_recording, prewarm, torch_private
from library.compiler.block_calls import BlockCall, NotDescribed
from library.compiler.payoff import SWITCHING, Payoff
from library.compiler.plan import CompilePlan, PlanEvent, PlanState
from library.config.building import build_config, config_notes
from library.config.problems import ConfigError
from library.train.choices import Choices
from library.train.compiling import background_compile, background_graphs, compile_process, compile_worker
from library.train.compiling.background_compile import BackgroundCompiler
from library.train.compiling.background_graphs import BackgroundGraphs
from library.train.compiling.trial_passes import TrialPasses
from tests.training import PLAIN_CODE, config_of, train

READY = 3  # the step before which everything is compiled
# A process that is less important than others waits for minutes where tests run beside it.
AS_IMPORTANT = """
import os, runpy
os.nice = lambda more: more
runpy.run_module("library.train.compiling.compile_worker", run_name="__main__")
"""
GIVEN = {"compile": True, "compile_warmup": "beside", "max_train_steps": 5, "seed": 1, "cache_latents": True}


class Ready:
    """Processes that have compiled all."""

    made: Any = None

    def __init__(self):
        Ready.made, self.ready, self.failures = self, [], []
        self.number, self.running, self.stopped = 0, True, False

    def __len__(self):
        return self.number

    def add(self, number):
        self.number = number

    def start(self, job):
        self.job, self.ready = job, [*range(len(job["calls"]))]

    @property
    def ended(self):
        return not self.running

    def keep_one(self):
        return False

    def stop(self):
        self.stopped, self.running = True, False


@pytest.fixture(autouse=True)
def from_step_on(monkeypatch):
    """What is compiled is brought in from the step READY on, when a real process is done, as if steps took longer."""
    due = BackgroundCompiler.due

    def waited(self):
        if self._graphs and self._clock.step < READY:
            return False
        if self._graphs and hasattr(self._graphs.processes, "wait"):
            self._graphs.processes.wait(600)
        return due.fget(self)

    monkeypatch.setattr(BackgroundCompiler, "due", property(waited))


def test_another_process_compiles_and_the_training_finds_all_of_it(demo, squares, tmp_path, monkeypatch):
    (tmp_path / "as_important.py").write_text(AS_IMPORTANT, encoding="utf-8")
    environment = {**PLAIN_CODE, "PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compile_process, "WORKER", "as_important")
    monkeypatch.setattr(prewarm, "_compile_small_graph", lambda kind: None)  # code for nothing but a quicker start
    values = {"compile_blocks": "single:0", "network_dropout": 0.1, "mixed_precision": "bf16", **GIVEN}
    values["network_args"] = ["single_dim=0"]  # an adapter less is several pieces of code less
    values["max_train_steps"] = READY
    counts = []
    log_switch = BackgroundCompiler.log_switch

    def counted(self, seconds, pauses):
        for name in ("inductor", "aot_autograd"):
            counts.append({k: n for k, n in torch_private.compile_counters(name).items() if "cache" in k and n})
        log_switch(self, seconds, pauses)

    began = BackgroundCompiler.begin

    def cleared(self, *given):
        for name in ("inductor", "aot_autograd"):
            torch_private.compile_counters(name).clear()
        return began(self, *given)

    monkeypatch.setattr(BackgroundCompiler, "log_switch", counted)
    monkeypatch.setattr(BackgroundCompiler, "begin", cleared)
    done = train(config_of(demo, "flux_train_network", train_data_dir=squares, output_dir=tmp_path, **values))
    assert counts == [{"fxgraph_cache_hit": 2}, {"autograd_cache_hit": 1}]
    (takeover,) = done.events("takeover")
    assert takeover["step"] == READY and len(takeover["pauses"]) == 1
    assert done.facts["compile"]["graphs"] == {"SingleStreamBlock": 1} == done.facts["compile"]["predicted"]


def test_a_run_resumed_after_the_takeover_is_equal_bit_for_bit(demo, squares, tmp_path, monkeypatch):
    monkeypatch.setattr(background_compile, "CompileProcesses", Ready)
    values = {"compile_backend": "eager", "network_dropout": 0.2, "save_state": True, **GIVEN}
    values |= {"compile_blocks": "double:0,single:0", "save_every_n_steps": 1, "train_data_dir": squares}

    def run(name, **changes):
        return train(config_of(demo, "flux_train_network", output_dir=tmp_path / name, **values | changes))

    first = run("first")
    (takeover,) = first.events("takeover")
    switched = takeover["step"]
    assert switched == READY - 1 + len(takeover["pauses"]) == READY + 1 and Ready.made.stopped  # one graph a step
    (state,) = first.file.parent.glob(f"*{switched:08d}-state")
    resumed = run("resumed", resume=state)
    assert resumed.losses == first.losses[switched:] and not resumed.events("takeover")
    assert {event["step"] for event in resumed.events("compile")} == {switched}
    pairs = zip(resumed.tensors().values(), first.tensors().values(), strict=True)
    assert all(torch.equal(left, same) for left, same in pairs)


def test_where_nothing_is_compiled_in_time_the_run_is_an_eager_one(demo, squares, tmp_path, monkeypatch, capsys):
    (tmp_path / "waits_for_input.py").write_text("import sys\nsys.stdin.read()\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compile_process, "WORKER", "waits_for_input")  # which the end of the training is
    seen: list[Any] = []
    monkeypatch.setattr(BackgroundCompiler, "due", property(lambda self: bool(seen.append(self._graphs))))
    options = {"train_data_dir": squares, "compile_backend": "aot_eager", **GIVEN, "max_train_steps": 2}
    done = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "one", **options))
    eager = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "two", **options | {"compile": False}))
    assert done.losses == eager.losses and not done.events("takeover") and not done.events("compile")
    assert not seen[0].processes.running
    closing = "ended before its blocks were compiled beside it (0 of 2 graphs ready), so they ran eagerly"
    assert sum(closing in line for line in capsys.readouterr().out.splitlines()) == 1
    if sys.platform != "win32":
        assert "its process was killed (signal 9)" in seen[0].processes.failures[0]


def test_the_process_is_less_important_to_the_system_than_the_training(monkeypatch, tmp_path):
    """By itself, and on Windows by who starts it."""
    nicer: list[Any] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"device": "cpu", "script": "no such script", "waited_for": false}'))
    monkeypatch.setattr(compile_worker, "_read_numbers", lambda numbers: None)
    monkeypatch.setattr(compile_worker.os, "nice", nicer.append, raising=False)
    with pytest.raises(ConfigError):
        compile_worker.main()
    assert nicer == [10]
    waited_for = '{"device": "cpu", "script": "no such script", "waited_for": true}'
    monkeypatch.setattr(sys, "stdin", io.StringIO(waited_for))
    with pytest.raises(ConfigError):
        compile_worker.main()
    assert nicer == [10]
    monkeypatch.setattr(compile_process.subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0x4000, raising=False)
    monkeypatch.setattr(compile_process.subprocess, "Popen", lambda *_, **how: nicer.append(how) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compile_process.CompileProcess()
    with pytest.raises(ZeroDivisionError):
        compile_process.CompileProcess(waited_for=True)
    assert [how["creationflags"] & 0x4000 for how in nicer[1:]] == [0x4000, 0]


def test_a_model_that_was_built_early_is_built_again_if_the_training_chose_other_options_since(monkeypatch):
    built: list[Any] = []
    monkeypatch.setattr(compile_worker, "build_model", lambda settings: built.append(settings["values"]))
    monkeypatch.setattr(compile_worker, "make_context", lambda device: built.append(device.type))
    monkeypatch.setattr(compile_worker, "prepare_called_blocks", lambda *_: None)
    # The memory of the GPU is taken only once there is a job.
    for since, expected in (({"a": 1}, [{"a": 1}, "cpu"]), ({"a": 2}, [{"a": 1}, "cpu", {"a": 2}])):
        built.clear()
        settings = {"device": "cpu", "script": "", "values": {"a": 1}}
        job = {"settings": settings | {"values": since}, "calls": []}
        lines = [json.dumps(settings | {"waited_for": True}), json.dumps(job), "", ""]
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        monkeypatch.setattr(compile_worker.os, "_exit", lambda code: None)
        assert compile_worker.main() == 0 and built == expected


def test_the_process_ends_with_its_input(monkeypatch):
    ended = []
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(compile_worker.os, "_exit", ended.append)
    compile_worker._read_numbers(queue.SimpleQueue())
    assert ended == [1]


def compiler(steps=1000, ranks=1, kind="cpu", **values):
    config = build_config(families.config_class("sdxl_train_network"), {"compile": True, **values}, notes=[])
    said = []
    journal = SimpleNamespace(say=said.append, event=lambda *_, **__: None)
    clock = SimpleNamespace(step=0, total=steps)
    world = SimpleNamespace(device=torch.device(kind), ranks=ranks)
    plan = CompilePlan()
    plan.log.expect("Linear", "wide")
    plan.begin([torch.nn.Linear(1, 1)], lambda block: None, {}, 0)
    background = BackgroundCompiler(config, world, journal, plan, clock, Choices())
    background.said = said
    return background


def passes_of(device):
    """Passes that only know a denoiser."""
    loss = SimpleNamespace(components=SimpleNamespace(denoiser=torch.nn.Linear(1, 1)), method=None)
    return TrialPasses(None, loss, device, lambda: None)


def beside(run, calls=()):
    """Let a process compile beside this run."""
    run._plan.postpone()
    run._plan.on(PlanEvent.START_PROCESS)
    run._calls = list(calls)
    run._graphs = BackgroundGraphs(run._calls, Ready(), run._plan, run._world.device)
    return run


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "recorded on a GPU"),
        ({"compile_warmup": "beside"}, ""),
        ({"compile_warmup": "beside", "compile_scope": "model"}, "compile_scope is model"),
        ({"compile_warmup": "beside", "compile_from_step": "4"}, "compile_from_step says when"),
        ({"compile_warmup": "beside", "blocks_to_swap": 2}, "blocks_to_swap moves what blocks"),
        ({"compile_warmup": "true"}, "compile_warmup is true"),
        ({"compile_backend": "aot_eager"}, "only inductor"),
        ({"fp8_base": True, "fp8_compute": True, "mixed_precision": "bf16"}, "products in 8 bits"),
    ],
)
def test_where_it_cannot_be_blocks_compile_before_the_first_step(values, why):
    asked = compiler(**values)
    problems = asked.why_not(torch.nn.Linear(1, 1))
    assert why in str(problems) if why else not problems
    told = [note for note in config_notes(asked._config) if note.option == "compile_warmup"]
    assert bool(told) == (values.get("compile_warmup") == "beside" and bool(why))
    assert all(str(note).startswith("compile_warmup has no effect here: ") and why in str(note) for note in told)
    assert "several processes" in str(compiler(ranks=2, compile_warmup="beside").why_not(torch.nn.Linear(1, 1)))


def test_a_run_whose_rest_does_not_pay_stays_eager():
    """Decided before the process begins, and again when its graphs are loaded."""
    payoff = Payoff(steps=100, step_seconds=0.1, sizes=1, loading=2.0, waiting=90.0)
    assert not payoff.pays and payoff.refusal(SWITCHING) == (
        "Blocks are not compiled: of 100 remaining steps (eager: 0.1 s each), compiled ones would start after about "
        "90 s of compiling and save 0 s, but cost 3 s to switch to"
    )
    assert Payoff(steps=10_000, step_seconds=0.1, sizes=1, loading=2.0, waiting=90.0).pays
    assert Payoff(steps=100, step_seconds=0.1, sizes=1).pays
    assert not Payoff(steps=50, step_seconds=0.1, sizes=1).pays


def test_where_the_rest_does_not_pay_any_more_when_all_is_loaded_blocks_stay_eager(monkeypatch):
    run = beside(compiler(steps=50), [BlockCall("", "Linear", None, "", True)])
    Ready.made.ready, run._step_seconds = [0], 0.1
    monkeypatch.setattr(background_compile.block_calls, "repeat", lambda *_: None)
    run.load_next_graph(passes_of(torch.device("cpu")))
    assert run._plan.state is PlanState.STAYS_EAGER and Ready.made.stopped and run._choices.stays_eager == 50
    assert "not compiled: of 50 remaining steps" in run.said[0] and not run.due


def test_where_there_is_no_room_to_compile_beside_them_a_short_run_does_not_wait_for_compiling(monkeypatch):
    """FLUX.1 on an H100: 40 steps of 0.55 s were over sooner than 21 s of compiling and 40 steps of 0.38 s."""
    monkeypatch.setattr(BackgroundCompiler, "why_not", lambda *_: "")
    monkeypatch.setattr(BackgroundCompiler, "_record_calls", lambda *_: [])
    monkeypatch.setattr(BackgroundCompiler, "_room", lambda *_: ("that needs 5.2 GiB of the GPU", 1))
    for steps, eager in ((40, True), (1500, False)):
        run = compiler(steps=steps)
        run._step_seconds, run._sizes = 0.55, 3
        run.begin(passes_of(torch.device("cpu")))
        assert run._plan.state is (PlanState.STAYS_EAGER if eager else PlanState.COMPILING)
        assert run._choices.stays_eager == (40 if eager else None)
        assert ("not compiled" if eager else "before the first step") in run.said[0]


def test_graphs_that_the_cache_has_are_loaded_before_the_first_step(monkeypatch):
    """With a full cache SDXL took 179 s so, and 204 s beside the first steps."""
    monkeypatch.setattr(BackgroundCompiler, "why_not", lambda *_: "")
    monkeypatch.setattr(BackgroundCompiler, "_record_calls", lambda *_: [])
    monkeypatch.setattr(BackgroundCompiler, "_start_processes", lambda *_: run._plan.on(PlanEvent.START_PROCESS))
    monkeypatch.setattr(background_compile, "fingerprint_settings", lambda *_: "settings")
    known: set[str] = set()
    monkeypatch.setattr(background_compile.cache, "is_warm", lambda name: name in known)
    cases = [({}, PlanState.BESIDE), ({"compile_dynamic": "false"}, PlanState.BESIDE)]
    for values, cold in cases:
        for known_now, state in ((set(), cold), ({"settings"}, PlanState.COMPILING if not values else cold)):
            known = known_now
            run = compiler(steps=4000, **values)
            run._step_seconds, run._sizes = 0.1, 3
            run.begin(passes_of(torch.device("cpu")))
            assert run._plan.state is state, (values, known_now)
    run = compiler(steps=40)
    run._step_seconds, run._sizes = 0.1, 3
    run.begin(passes_of(torch.device("cpu")))
    assert run._plan.state is PlanState.STAYS_EAGER


def test_a_run_that_has_loaded_all_remembers_that_the_cache_has_them(monkeypatch):
    run, remembered = beside(compiler(), [BlockCall("", "Linear", None, "", True)] * 2), []
    run._name, run._step_seconds, Ready.made.ready = "settings", 0.1, [1, 0]
    monkeypatch.setattr(background_graphs.block_calls, "repeat", lambda *_: None)
    monkeypatch.setattr(background_compile.cache, "note_warm", remembered.append)
    run.load_next_graph(passes_of(torch.device("cpu")))
    assert not remembered
    run.load_next_graph(passes_of(torch.device("cpu")))
    assert remembered == ["settings"] and run._plan.state is PlanState.COMPILED


def fake_processes(*states):
    """Processes without programs, each of which runs or has ended."""
    found = compile_process.CompileProcesses()
    for number, running in enumerate(states):
        one = SimpleNamespace(running=running, unfinished=[number], failure="", stopped=False)
        one.stop = one.kill = lambda one=one: setattr(one, "stopped", True)
        found._processes.append(one)
    return found


def test_where_memory_is_short_one_of_several_processes_goes_on():
    run = beside(compiler(), [])
    run._graphs.processes = fake_processes(False, True, True, True)
    others = run._graphs.processes._processes[:]
    run._graphs.processes.waiting.append(9)
    assert run.make_room() and [one.stopped for one in others] == [True, False, True, True]
    assert sorted(run._graphs.processes.waiting) == [0, 2, 3, 9] and run._graphs.processes.waiting[-1] == 9
    assert "One process continues" in run.said[0]
    assert run.make_room() and others[1].stopped and run._plan.state is PlanState.STAYS_EAGER
    assert not run.make_room()


def test_a_resumed_run_whose_blocks_stay_eager_says_so_and_how_to_compile_them():
    resumed = compiler(compile_warmup="beside")
    resumed._choices.stays_eager = 1000
    resumed.begin(passes_of(torch.device("cpu")))
    assert resumed._plan.state is PlanState.STAYS_EAGER
    (line,) = resumed.said
    assert "as in the run that is continued" in line and "compile_warmup = true" in line


def test_where_memory_is_tight_there_is_no_second_process(monkeypatch):
    block = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    argument = block_calls.encode_argument([[torch.zeros(1, 4096, 1024)], {}])
    tried = compiler(kind="cuda")
    tried._calls = [BlockCall("0", "Linear", argument, "", True)]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    told = {}
    for free in (4, 2):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * 2**30, 8 * 2**30))
        told[free], _ = tried._room(block)
    assert not told[4] and "needs 2.8 GiB of the GPU, and the training leaves 1.5 GiB" in told[2]


def test_where_eager_steps_do_not_fit_blocks_are_compiled_before_the_first(demo, squares, tmp_path, monkeypatch):
    def does_not_fit(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(BackgroundCompiler, "_record_calls", does_not_fit)
    values = {**GIVEN, "compile_backend": "eager", "max_train_steps": 1, "train_data_dir": squares}
    done = train(config_of(demo, "flux_train_network", output_dir=tmp_path, **values))
    assert done.facts["compile"]["graphs"] == done.facts["compile"]["predicted"]
    assert {event["step"] for event in done.events("compile")} == {0} and not done.events("takeover")


def test_the_compiler_is_imported_beside_the_steps_after_the_first(monkeypatch):
    imported = []
    monkeypatch.setattr(background_graphs.torch_private, "import_inductor", lambda: imported.append(run._clock.step))
    run = compiler()
    for step, expected in ((1, []), (2, []), (3, [])):  # nothing is compiled beside this one
        run._clock.step = step
        run.import_compiler()
        assert imported == expected
    beside(run)
    for step in (1, 2, 3):
        run._clock.step = step
        run.import_compiler()
    run._graphs._imports.join()
    assert imported == [2]


def test_a_process_that_fails_is_reported():
    run = beside(compiler(), [BlockCall("", "Linear", None, "", True)])
    Ready.made.failures, run._clock.step = ["no compiler (code 1)"], READY
    assert not run.due  # as long as another process runs
    Ready.made.running = False
    assert run.due
    run.load_next_graph(passes_of(torch.device("cpu")))
    assert not run.due and run._plan.state is PlanState.STAYS_EAGER
    assert Ready.made.stopped and run._choices.stays_eager == 1000 and "no compiler (code 1)" in run.said[0]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no kernel image"), ImportError("No module named triton"), torch.OutOfMemoryError("out of memory")],
)
def test_whatever_fails_while_a_graph_is_loaded_leaves_an_eager_run(error, monkeypatch):
    run = beside(compiler(), [BlockCall("", "Linear", None, "", True)])
    Ready.made.ready = [0]
    monkeypatch.setattr(background_graphs.block_calls, "repeat", lambda *_: (_ for _ in ()).throw(error))
    run.load_next_graph(passes_of(torch.device("cpu")))
    assert run._plan.state is PlanState.STAYS_EAGER and str(error) in run.said[0] and "\n" not in run.said[0]


def test_a_process_that_cannot_be_started_is_replaced_by_compiling_first(monkeypatch):
    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(compile_process, "CompileProcess", refuse)
    monkeypatch.setattr(background_compile, "compile_job", lambda *_: {})
    run = compiler()
    run._plan.postpone()
    passes = passes_of(torch.device("cpu"))
    passes.compute_loss.method = SimpleNamespace(trained_parts={})
    passes.compute_loss.components.encoders = {}
    run._start_processes(TrialPasses(SimpleNamespace(kinds=dict), passes.compute_loss, passes.device, passes.pause), 3)
    assert (
        run._plan.state is PlanState.COMPILING and "no process could be started (Cannot allocate memory)" in run.said[0]
    )


@pytest.mark.parametrize("kind", ["cuda", "cuda:2"])
def test_the_process_is_told_which_gpu_it_is(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    config = build_config(families.config_class("sdxl_train_network"), {"compile": True}, notes=[])
    job = compile_process.compile_job(config, [(1, 8, 8)], False, [], torch.device(kind))
    assert job["settings"]["device"] == {"cuda": "cuda:3", "cuda:2": "cuda:2"}[kind]


def test_where_recordings_find_no_room_the_process_ends_and_they_are_tried_again(monkeypatch):
    run, tried = beside(compiler(kind="cuda")), []

    class Recording:
        seconds, pace = 0.0, ""

        def __init__(self, *given):
            tried.append(Ready.made.stopped)
            if not stays and Ready.made.stopped:
                return
            raise torch.OutOfMemoryError("CUDA out of memory")

        def capture(self, *given):
            return ""

    monkeypatch.setattr(cudagraph, "Recording", Recording)
    monkeypatch.setattr(cudagraph, "GraphMemory", lambda: None)
    for name in ("get_rng_state", "set_rng_state", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    asked = graph_recording.Call.of((torch.zeros(1, 4),), {})
    denoiser = torch.nn.Linear(1, 1)
    stays, recorder = False, cudagraph.GraphedModel(denoiser, CompilePlan())
    recorder.free_others = run.make_room
    assert recorder.record(None, asked) and tried == [False, True] and not recorder.why_not
    assert "memory is too small for both" in run.said[0] and not run.make_room()
    recorder.forget()
    stays = True  # with nothing left to end, recordings are given up
    assert not recorder.record(None, asked) and tried == [False, True, True] and "too small" in recorder.why_not


def test_on_windows_it_compiles_in_one_process_and_its_words_arrive_in_utf_8(monkeypatch, tmp_path):
    """PyTorch cannot start its pool there, and Python writes into pipes in an old code page."""
    code = f"import os; print('図', os.environ.get('{compile_process.THREADS}')); raise SystemExit(3)"
    (tmp_path / "says.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    monkeypatch.delenv(compile_process.THREADS, raising=False)
    monkeypatch.setattr(compile_process, "WORKER", "says")

    def last_words():
        process = compile_process.CompileProcess()
        process.start({"settings": {}, "calls": []}, deque(), [])
        assert process.wait(60)
        return process.failure

    monkeypatch.setattr(compile_process.sys, "platform", "linux")
    assert re.fullmatch(r"図 \d+ \(code 3\)", last_words())
    monkeypatch.setattr(compile_process.sys, "platform", "win32")
    assert last_words() == "図 None (code 3)"


def test_what_is_no_tensor_and_no_plain_value_is_not_described():
    unencodable = [(torch.zeros(2, 3), None, 1.5), {"deep": [True, "x"]}]
    (first, second) = block_calls.decode_argument(block_calls.encode_argument(unencodable), torch.device("cpu"))
    assert first[0].shape == (2, 3) and first[1:] == (None, 1.5) and second == {"deep": [True, "x"]}
    with pytest.raises(NotDescribed):
        block_calls.encode_argument(object())
