"""What a training step costs besides the model and the optimizer: milliseconds of the main thread, part by part.

    python benchmarks/step_overhead.py                        # LoRA for both families on the demo's tiny models
    python benchmarks/step_overhead.py --script sdxl_train --steps 200 --board

On a GPU the host only has to keep ahead: as long as all of this, and what the model launches, takes less than the GPU
needs for its step, it costs nothing. Time is that of the main thread's own work (`time.thread_time`), so that a busy
machine and waiting for batches do not count; on a CPU the kernels of the parts themselves do. Everything is eager.
"""

import argparse
import contextlib
import functools
import io
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

WARM_UP = 10
AIM = 2.0  # ms
OWN = "not counted"  # model, backward, optimizer
PARTS = {
    "next batch": "waiting for the next window, epochs, the wish to stop",
    "loss": "noise, target, conditions, error; without the model",
    "backward": "around backward: seeds, accumulation, accelerate",
    "update": "guard, schedule, EMA; without clipping, the optimizer, and freeing gradients",
    "log": "learning rates, numbers, progress.jsonl, console, trackers",
    "when due": "asking whether to validate, sample or save",
}


class Stopwatch:
    """Seconds of each part in each step. Parts nest; inner time is taken off the outer one."""

    def __init__(self):
        self.steps, self.now, self.inside = [], defaultdict(float), []

    @contextlib.contextmanager
    def part(self, name):
        begin, self.inside = time.thread_time(), [*self.inside, 0.0]
        try:
            yield
        finally:
            took = time.thread_time() - begin
            *self.inside, inner = self.inside
            self.now[name] += took - inner
            if self.inside:
                self.inside[-1] += took

    def wrap(self, owner, method, name):
        real = getattr(owner, method)

        @functools.wraps(real)
        def timed(*args, **values):
            with self.part(name):
                return real(*args, **values)

        setattr(owner, method, timed)

    def end_step(self):
        self.steps.append(dict(self.now))
        self.now.clear()


def watch(family):
    """Put the stopwatch around the parts of a step."""
    from accelerate import Accelerator

    from library.train import loop
    from library.train.evaluation.samples import SampleRunner
    from library.train.evaluation.validation import ValidationRunner
    from library.train.saving.checkpointer import Checkpointer
    from library.train.step.loss import LossFunction
    from library.train.step.stepper import Stepper
    from library.train.step.updates import Updates
    from library.train.step_log import StepLog

    clock = Stopwatch()
    clock.wrap(family, "predict", OWN)
    clock.wrap(Accelerator, "clip_grad_norm_", OWN)
    clock.wrap(Updates, "zero_grad", OWN)
    compute_loss, computed = LossFunction.__call__, []

    def kept(self, *args, **values):
        computed[:] = [compute_loss(self, *args, **values)]
        return computed[0]

    LossFunction.__call__ = kept
    clock.wrap(LossFunction, "__call__", "loss")
    clock.wrap(loop, "train_step", "backward")
    for method in ("clip", "should_step", "step", "limit_norms", "average_weights"):
        clock.wrap(Updates, method, "update")
    for owner, method in ((Updates, "rates"), (StepLog, "push")):
        clock.wrap(owner, method, "log")
    for owner in (ValidationRunner, SampleRunner, Checkpointer):
        clock.wrap(owner, "when_due", "when due")
    begin, steps, backward = Updates.__init__, Stepper.__iter__, Accelerator.backward

    def back(self, loss, **options):
        with clock.part(OWN):
            backward(self, loss, **options)
            computed.pop().detach_()  # takes the graph apart, which is part of the model's backward pass
            loss.detach_()

    def updates(self, *args):
        begin(self, *args)
        clock.wrap(self.optimizer, "step", OWN)

    def stepped(self):
        windows = steps(self)
        while True:
            with clock.part("next batch"):
                window = next(windows, None)
            if window is None:
                return
            yield window
            clock.end_step()

    for cls, name, own in (
        (Updates, "__init__", updates),
        (Stepper, "__iter__", stepped),
        (Accelerator, "backward", back),
    ):
        setattr(cls, name, own)
    return clock


def measure(script, steps, board):
    """Train, and return the median milliseconds of each part."""
    from library import families
    from library.cli.train import train
    from library.config.building import build
    from library.config.formats import read_toml
    from library.demo import files

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        demo = files.prepare(place / "demo", (families.config_class(script).family,))
        values = read_toml(demo.configs[script]) | {"compile": False, "resolution": "64", "output_dir": folder}
        values |= {"max_train_steps": steps, "logging_dir": str(place / "logs") if board else None}
        config = build(families.config_class(script), values, notes=[])
        clock = watch(type(families.family_for(config)))
        train(config)
    timed = clock.steps[WARM_UP:]
    return {name: statistics.median(step.get(name, 0.0) for step in timed) * 1000 for name in (*PARTS, OWN)}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--script", action="append", help="which trainings (default: both LoRA scripts)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--board", action="store_true", help="write TensorBoard's curves too")
    options = parser.parse_args()
    for script in options.script or ["flux_train_network", "sdxl_train_network"]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = measure(script, options.steps, options.board)
        total = sum(found[name] for name in PARTS)
        print(f"\n{script}: {total:.2f} ms a step ({'within' if total < AIM else 'above'} the aim of {AIM:g} ms)")
        for name, about in PARTS.items():
            print(f"  {name:<11} {found[name]:6.3f} ms  {about}")
        print(f"  {OWN:<11} {found[OWN]:6.3f} ms  model and optimizer: forward, backward, clipping, step, freeing")


if __name__ == "__main__":
    main()
