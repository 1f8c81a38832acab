"""CUDA graphs of a whole denoiser. What needs a GPU runs where there is one."""

import contextlib
import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from library.compiler import cudagraph
from library.compiler.graph_recording import Call, Recording
from library.compiler.plan import CompilePlan, PlanState


class Small(nn.Module):
    """A weight that learns, one that is frozen, one that is never used; an answer in a tuple, arguments in a dict."""

    def __init__(self):
        super().__init__()
        self.learns, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, x, more, scale=1.0):
        self.calls += 1
        return (self.frozen(self.learns(x).relu() + more["text"]) * scale,)


def given(rows, device="cpu", learns=False):
    torch.manual_seed(rows)
    return torch.randn(rows, 8, device=device), {"text": torch.randn(rows, 8, device=device, requires_grad=learns)}


def test_a_call_is_taken_apart_and_put_together_again():
    x, more = given(3)
    asked = Call.of((x,), {"more": more, "scale": 2.0})
    args, kwargs = asked.arguments([torch.zeros(1), torch.ones(1)])
    assert args[0].item() == 0 and kwargs["more"]["text"].item() == 1 and kwargs["scale"] == 2.0


def test_calls_that_differ_in_anything_but_their_numbers_have_recordings_of_their_own():
    x, more = given(3)
    same = Call.of((x + 1,), {"more": {"text": more["text"] * 2}, "scale": 2.0}).key
    assert Call.of((x,), {"more": more, "scale": 2.0}).key == same
    others = [
        Call.of((x[:2],), {"more": more, "scale": 2.0}),
        Call.of((x.double(),), {"more": more, "scale": 2.0}),
        Call.of((x,), {"more": more, "scale": 3.0}),
        Call.of((x,), {"more": {"words": more["text"]}, "scale": 2.0}),
        Call.of((x.clone().requires_grad_(),), {"more": more, "scale": 2.0}),
    ]
    assert len({same, *(call.key for call in others)}) == 6


def test_what_cannot_be_recorded_runs_as_ever():
    model = Small()
    plain = model(*given(3))[0]
    plan = CompilePlan()
    cudagraph.record_denoiser_calls(model, plan)
    assert type(model).__name__ == "Small" and "_recorder" not in model.state_dict()
    assert torch.equal(model(*given(3))[0], plain)  # not on a GPU
    with torch.no_grad():
        assert torch.equal(model(*given(3))[0], plain)
    plan.give_up("the compiler broke")
    assert torch.equal(model(*given(3))[0], plain)
    assert not model._recorder.recordings


def test_all_passes_with_gradients_run_under_one_setting_of_autocast():
    """Warm-up passes run without its memory of casts; steps that are not recorded would be compiled again with it."""
    model, seen = Small(), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    cudagraph.record_denoiser_calls(model, CompilePlan())
    with torch.autocast("cpu", torch.bfloat16):
        model(*given(3))
        cudagraph.recorder_of(model).give_up("they would not pay")
        model(*given(3))
        with torch.no_grad():
            model(*given(3))
    assert seen == [False, False, True] and torch.is_autocast_cache_enabled()


@pytest.fixture
def recorder(monkeypatch):
    """A function: what recording a size does, the sizes recorded so far -> a recorder that needs no GPU."""
    monkeypatch.setattr(cudagraph, "GraphMemory", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * cudagraph.SPARE_BYTES, 0))
    model = Small()

    def make(capture, reserve=None):
        recorder_model = cudagraph.GraphedModel(model, CompilePlan(), reserve)

        class Pretended:
            addresses, before, seconds = [p.data_ptr() for p in model.parameters() if p.requires_grad], 1.0, 0.0
            pace = ""

            def __init__(self, call, asked, learn, memory, passes):
                self.elements = asked.elements
                torch.rand(3)

            def capture(self, learn, gradients, memory):
                return capture(len(recorder_model.recordings)) or ""

            def time(self):
                self.seconds = 0.5
                return self.seconds

        monkeypatch.setattr(cudagraph, "Recording", Pretended)
        return recorder_model, lambda rows: recorder_model.record(model, Call.of(given(rows), {}))

    return make


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_sizes_that_no_longer_fit_leave_room_for_steps_without_recording(recorder, caplog):
    """Five sizes where four fit, then two of them: the other three run without."""
    recorder_model, record = recorder(lambda number: out_of_memory() if number >= 4 else "")
    assert [record(rows) is None for rows in range(5, 0, -1)] == [False] * 4 + [True]
    assert (
        not recorder_model.recordings
        and "inputs of 1 x 8 do not fit" in caplog.text
        and "2 sizes are recorded" in caplog.text
    )
    assert [record(rows) is None for rows in range(1, 6)] == [False] * 2 + [True] * 3


@pytest.mark.parametrize(
    ("capture", "reserve", "told"),
    [
        (out_of_memory, None, "too small for those of inputs of 3 x 8"),
        (lambda _: "the processor draws", None, "the processor draws"),
        (lambda _: "", 10 * cudagraph.SPARE_BYTES, "too little of the GPU's memory for the optimizer"),
    ],
)
def test_a_gpu_or_a_model_that_cannot_record_goes_on_without(capture, reserve, told, recorder, caplog):
    caplog.set_level("INFO")
    recorder_model, record = recorder(capture, reserve)
    assert record(3) is None and not recorder_model.recordings and told in recorder_model.why_not
    assert caplog.text.count("CUDA graphs are no longer recorded") == 1 and told in caplog.text


@pytest.mark.parametrize(
    ("state", "warns"), [("EAGER", False), ("STAYS_EAGER", True), ("COMPILED", True), ("OFF", True)]
)
def test_only_lost_recordings_are_a_warning_not_those_that_compiled_blocks_may_find_room_for(
    state, warns, recorder, caplog
):
    caplog.set_level("INFO")
    recorder_model, record = recorder(out_of_memory)
    recorder_model.plan.state = PlanState[state]
    assert record(3) is None and "too small for those of inputs of 3 x 8" in recorder_model.why_not
    assert [entry.levelname == "WARNING" for entry in caplog.records] == [warns]


def test_steps_that_need_less_memory_are_tried_anew(recorder):
    full = [True]
    recorder_model, record = recorder(lambda _: out_of_memory() if full.pop() else "")
    assert record(3) is None and recorder_model.lacks_memory
    full.append(False)
    recorder_model.begin_again()
    assert not recorder_model.why_not and record(3) and not recorder_model.lacks_memory


def test_room_is_left_for_the_optimizer_until_it_has_taken_its_own(recorder, monkeypatch):
    recorder_model, record = recorder(lambda _: "", reserve=8 * cudagraph.SPARE_BYTES)
    assert record(1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * cudagraph.SPARE_BYTES, 0))  # after its first step
    recorder_model.drop_reserve()
    assert record(2) and len(recorder_model.recordings) == 2
    recorder_model, record = recorder(lambda _: "", reserve=8 * cudagraph.SPARE_BYTES)
    assert record(1) is None and "too little" in recorder_model.why_not and recorder_model.lacks_memory


def test_too_little_memory_is_seen_behind_the_error_of_a_recording_that_could_not_be_ended():
    """PyTorch then answers with an error of its own, which would let all sizes go instead of half."""

    class Fails:
        def capturing(self, graph):
            try:
                out_of_memory()
            except torch.OutOfMemoryError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    recording = object.__new__(Recording)
    recording._random_on_host, recording.forward = False, None
    recording.states = cast(Any, SimpleNamespace(forward=lambda capturing: contextlib.nullcontext()))
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory"):
        recording.capture([], [], cast(Any, Fails()))


def test_what_is_no_faster_is_not_recorded_unless_it_is_requested(recorder, monkeypatch):
    monkeypatch.setattr(cudagraph, "MAX_REPLAY_SHARE", 0.4)
    recorder_model, record = recorder(lambda _: "", reserve=0)
    assert record(3) is None and "0.500 s with them" in recorder_model.why_not
    recorder_model, record = recorder(lambda _: "")
    assert record(3) and not recorder_model.why_not


def test_recording_draws_no_random_number(recorder):
    _, record = recorder(lambda _: "")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    asked = given(3)
    torch.set_rng_state(before)
    assert record(3) and asked and not torch.equal(torch.get_rng_state(), before)  # `given` seeds
    after = torch.get_rng_state()
    torch.manual_seed(3)
    given(3)
    assert torch.equal(torch.get_rng_state(), after)


def test_what_does_not_fit_beside_recordings_is_tried_again_without_them(recorder):
    recorder_model, record = recorder(lambda _: "")
    model = recorder_model.denoiser()
    model._recorder = recorder_model
    record(3)
    answers = iter([out_of_memory, lambda: "drawn"])
    assert cudagraph.with_room(model, lambda: next(answers)()) == "drawn" and not recorder_model.recordings
    assert record(3)  # and recorded again
    recorder_model.make_room()
    with pytest.raises(torch.OutOfMemoryError):
        cudagraph.with_room(model, out_of_memory)


def gradients(model, device, steps):
    """Answers and gradients of a few batches that are added up, of two sizes that take turns."""
    step_gradients = []
    for rows in steps:
        x, more = given(rows, device, learns=True)
        answer = model(x, more)[0]
        answer.square().sum().backward()
        step_gradients += [answer.detach(), more["text"].grad]
    return [*step_gradients, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [(3,), (3, 3, 3), (3, 5, 3, 5, 5, 3)])
def test_what_is_played_back_is_what_would_have_been_computed(steps):
    torch.manual_seed(0)
    model = Small().cuda()
    recorded = copy.deepcopy(model)
    cudagraph.record_denoiser_calls(recorded, CompilePlan())
    for _ in range(3):
        expected, actual = gradients(model, "cuda", steps), gradients(recorded, "cuda", steps)
        assert len(expected) == len(actual)
        for first, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(first, other)
        for network in (model, recorded):
            torch.optim.SGD(network.parameters(), 0.1).step()
            network.zero_grad(set_to_none=True)
    assert len(recorded._recorder.recordings) == len(set(steps))
    others = (cudagraph.PASSES_OF_OTHER_SIZES + 1) * (len(set(steps)) - 1)
    assert recorded.calls == cudagraph.WARMUP_PASSES + 1 + others


@pytest.mark.gpu
def test_a_second_forward_pass_leaves_the_first_ones_memory_alone():
    model = Small().cuda()
    recorded = copy.deepcopy(model)
    cudagraph.record_denoiser_calls(recorded, CompilePlan())
    for _ in range(2):
        for network in (model, recorded):
            network.zero_grad(set_to_none=True)
            first, other = network(*given(3, "cuda"))[0], network(*given(3, "cuda"))[0].detach()
            (first - 2 * other).square().sum().backward()
        torch.testing.assert_close(model.learns.weight.grad, recorded.learns.weight.grad)
    network(*given(3, "cuda"))  # thrown away: the next one is played back again
    calls = recorded.calls
    network(*given(3, "cuda"))[0].sum().backward()
    assert recorded.calls == calls


@pytest.mark.gpu
def test_random_numbers_are_drawn_anew_each_time():
    class Noisy(Small):
        def forward(self, x):
            return torch.nn.functional.dropout(self.learns(x), 0.5)

    model = Noisy().cuda()
    cudagraph.record_denoiser_calls(model, CompilePlan())
    x = given(16, "cuda")[0]
    draws_of_steps = []
    for _ in range(4):
        answer = model(x)
        answer.sum().backward()
        draws_of_steps.append(answer.detach())
    assert all(not torch.equal(draws_of_steps[0], other) for other in draws_of_steps[1:])


@pytest.mark.gpu
def test_weights_that_moved_are_noticed(caplog):
    model = Small().cuda()
    plain = copy.deepcopy(model)
    cudagraph.record_denoiser_calls(model, CompilePlan())
    gradients(model, "cuda", (3,))
    gradients(plain, "cuda", (3,))
    model.learns.weight.data = model.learns.weight.data.clone()
    for first, other in zip(gradients(model, "cuda", (3,)), gradients(plain, "cuda", (3,)), strict=True):
        torch.testing.assert_close(first, other)
    assert "weights have moved" in caplog.text and not model._recorder.recordings


@pytest.mark.gpu
def test_where_memory_is_short_the_largest_size_makes_room_for_the_others():
    """A size that comes first leaves no block large enough for a larger one; both fit into the larger one's memory."""

    class Wide(Small):
        def forward(self, x, more):
            return (super().forward(x, more)[0].repeat(1, 2**18).sin().sum(1, keepdim=True),)  # 8 MiB a row

    model = Wide().cuda()
    expected = {rows: gradients(copy.deepcopy(model), "cuda", (rows,)) for rows in (40, 60)}
    recorded = copy.deepcopy(model)
    cudagraph.record_denoiser_calls(recorded, CompilePlan())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gradients(recorded, "cuda", (60,))
    taken = torch.cuda.memory_reserved() - before
    recorded._recorder.forget()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.3 * taken) / total)
    try:
        for rows in (40, 60, 40, 60):
            recorded.zero_grad(set_to_none=True)
            for first, other in zip(expected[rows], gradients(recorded, "cuda", (rows,)), strict=True):
                torch.testing.assert_close(first, other)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(recorded._recorder.recordings) == 2 and recorded._recorder.size_limit == cudagraph.MAX_SIZES


@pytest.mark.gpu
def test_a_size_that_does_not_fit_runs_without_recording():
    class Large(Small):
        def forward(self, x, more):
            if len(x) == 7 and torch.cuda.is_current_stream_capturing():
                torch.empty(2**50, device="cuda")
            return super().forward(x, more)

    model = Large().cuda()
    recorded = copy.deepcopy(model)
    cudagraph.record_denoiser_calls(recorded, CompilePlan())
    for capacity in (0, 1, 1):  # of three sizes two fitted, so one is recorded again
        steps = (3, 5, 7, 3, 5, 7) if capacity else (3, 5, 7)
        expected, actual = gradients(model, "cuda", steps), gradients(recorded, "cuda", steps)
        for first, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(first, other)
        assert len(recorded._recorder.recordings) == capacity
        for network in (model, recorded):
            network.zero_grad(set_to_none=True)
