"""Where the time of a training step goes: PyTorch's profiler over some steps, and a trace for details."""

import time
import warnings

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from library.bench import machine, prepared_model, profile_advice, profile_summary
from library.bench.profile_summary import ProfileRow
from library.bench.subjects import Subject
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, counted
from library.jobs.work import JobRecord
from library.measuring import timing
from library.measuring.candidates import Candidate

TRACE = "trace.json"
WARM_UP = timing.TimingPlan(steps=5, warmup=4, seconds=20.0)
MAX_PROFILED_STEPS = 5  # more make the trace too long for a browser


def profile_training(
    subject: Subject, candidate: Candidate, device: torch.device, resolution: int, steps: int, work: JobRecord
) -> JsonObject:
    """Profile some steps of a training; return the result file's content. The trace goes into the work's folder."""
    config = subject.config(candidate.chosen())
    began = time.time()
    work.phase(Message("warming up: {variant} at {size}", variant=candidate.name, size=resolution), 0, 3)
    try:
        with prepared_model.open_prepared(subject, config, device, resolution) as ready:
            plain = timing.measure_call(ready.step, device, WARM_UP)
            work.phase(Message("profiling {steps}", steps=counted(steps, "step")), 1, 3)
            profiler = _profiled(ready, device, steps)
            work.phase(Message("writing the trace"), 2, 3)
            profiler.export_chrome_trace(str(work.folder / TRACE))
            compiled = ready.compiling()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "out of memory at {resolution}: choose a smaller --resolution or --batch", resolution=resolution
        ) from error
    on = machine.measured_machine(device)
    facts = profile_summary.summary(profile_rows(profiler), steps, plain.p50, device.type)
    facts |= {"way": {"name": candidate.name, "options": candidate.chosen()}, "resolution": resolution, **compiled}
    facts |= {"peak_gb": round(plain.peak_gb, 2), "memory_gb": on.get("memory_gb"), "machine": on}
    facts |= {"subject": {"title": subject.title, "batch": subject.batch, **subject.about}}
    facts |= {
        "set": profile_advice.settings_for_advice(config),
        "kind": "profile",
        "schema": 1,
        "started": began,
        "finished": True,
    }
    findings = [finding for finding in profile_advice.judge(facts) if _possible(subject, candidate, finding.options)]
    return facts | {"verdict": [vars(finding) for finding in findings]}


def _possible(subject: Subject, candidate: Candidate, options: JsonMapping) -> bool:
    """Return whether this training can have these options, some of which exclude each other."""
    try:
        subject.config({**candidate.chosen(), **options})
    except ConfigError:
        return False
    return True


def _profiled(ready: prepared_model.PreparedModel, device: torch.device, steps: int) -> profile:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with warnings.catch_warnings(action="ignore"), profile(activities=activities) as profiler:
        for _ in range(steps):
            ready.step()
        timing.wait(device)
    return profiler


def profile_rows(profiler: profile) -> list[ProfileRow]:
    """Return the profiler's events by name: count, and microseconds on the host or the device itself."""
    rows = []
    for event in profiler.key_averages():
        on_device = event.device_type != DeviceType.CPU
        if on_device and getattr(event, "is_user_annotation", False):  # a span around kernels that have their own rows
            continue
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        rows.append(ProfileRow(event.key, event.count, float(spent), on_device))
    return rows
