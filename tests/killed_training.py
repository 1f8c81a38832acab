"""Kill a training again and again at random moments, and resume it from what it left.

A program of its own, which imports PyTorch once and then forks. Each life is a process that SIGKILL or an alarm ends
once it has touched a given number of files, or a moment later, without running any clean-up.
"""

import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

WRITING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def main(toml: str, folder: str, kills: int, seed: int) -> None:
    """Print as JSON the file touched last before each death, and how many trainings finished with equal results."""
    import torch

    import library.train.loop  # noqa: F401 - loaded once, for all lives
    from library import families
    from library.config.formats import read_toml

    # not torch.set_num_threads, which could make the lives fail: see tests/fork_server.py
    assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS to 1: other threads would be missing after a fork"
    values, place, chance = read_toml(toml), Path(folder), random.Random(seed)
    warm_up(families.family_for(config(values, {})))
    gc.collect()
    gc.freeze()  # a collection in a life would write to, and so copy, every page
    reference = Life(values, place / "reference")
    assert reference.end(None) == 0, reference.said()
    span = reference.events() // 3
    deaths: list[str] = []
    finished = 0
    for number in itertools.count():
        life = Life(values, place / str(number))
        while (code := life.end((chance.randint(1, span), chance.choice([0.0, 1e-3 * chance.random()])))) != 0:
            if life.was_complete():
                break
            assert code < 0, life.said()
            deaths.append(life.last())
            life.check()
            if len(deaths) == kills:
                assert life.end(None) == 0 or life.was_complete(), life.said()
                break
        life.check()
        assert not life.leftovers(), life.leftovers()
        assert life.result() == reference.result()
        finished += 1
        if len(deaths) >= kills:
            break
    print(json.dumps({"deaths": deaths, "finished": finished}))


def warm_up(family: Any) -> None:
    """Load what every life would otherwise load. No backward pass: after one, PyTorch would allow none in the forks."""
    import torch
    from accelerate import Accelerator

    from library import methods
    from library.distributed.world import World  # noqa: F401

    parts = family.load(torch.float32)
    with torch.no_grad():
        family.latents(parts, torch.zeros(1, 3, 64, 64), torch.Generator())
        family.text(parts, ["zorb"])
    method = methods.attach_method(parts, family, family.config)
    torch.optim.AdamW(method.parameters())
    Accelerator(cpu=True).state._reset_state(True)


def config(values: dict[str, Any], more: dict[str, Any]) -> Any:
    from library import families
    from library.config.building import build_config

    return build_config(families.config_class("flux_train_network"), {**values, **more})


class Life:
    """One training, in as many processes as the kills require."""

    def __init__(self, values: dict[str, Any], place: Path) -> None:
        self.place, self.images, self.output = place, place / "images", place / "output"
        shutil.copytree(values["train_data_dir"], self.images)
        self.values = {**values, "train_data_dir": str(self.images), "output_dir": str(self.output)}

    def end(self, kill: tuple[int, float] | None) -> int:
        """Train until the end, or until `kill`: (files touched, seconds after that); returns the exit code."""
        resume = self.newest()
        if resume is None:  # as a user would remove a result that has no state
            for path in self.output.glob("m*"):
                path.unlink()
        pid = os.fork()
        if not pid:
            os._exit(self._live(kill, {"resume": str(resume)} if resume else {}))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _live(self, kill: tuple[int, float] | None, more: dict[str, Any]) -> int:
        out = os.open(self.place / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        touched = os.open(self.place / "touched.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        count = itertools.count(1)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if not (event in WRITING or (event == "open" and set(str(args[1])) & set("wax"))):
                return
            if not str(args[0]).startswith((str(self.images), str(self.output))) or "/runs/" in str(args[0]):
                return
            os.write(touched, f"{event} {Path(str(args[0])).relative_to(self.place)}\n".encode())
            if kill and next(count) == kill[0]:
                if not kill[1]:
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.setitimer(signal.ITIMER_REAL, kill[1])  # SIGALRM has no handler, so it ends the process

        sys.addaudithook(hook)
        from library.cli.train import train

        try:
            train(config(self.values, more))
        except BaseException:
            import traceback

            traceback.print_exc()
            return 1
        return 0

    def newest(self) -> Path | None:
        """The state with the most steps, from which to resume."""
        from library.train.saving import state_files

        states = [path for path in self.output.glob("m*-state") if not path.name.startswith(".")]
        return max(states, key=lambda path: state_files.read_progress(path)["current_step"], default=None)

    def check(self) -> None:
        """Check that every file under its final name is complete; only temporary ones, behind a dot, may be torn."""
        import numpy as np
        import torch
        from safetensors.torch import load_file

        from library.train.saving import resume_check

        for path in (p for p in self.place.rglob("*") if not any(part.startswith(".") for part in p.parts)):
            if path.suffix == ".safetensors":
                assert all(tensor.isfinite().all() for tensor in load_file(path).values()), path
            elif path.suffix == ".npz":
                with np.load(path) as npz:
                    assert all(npz[name] is not None for name in npz.files) and npz.files, path
            elif path.suffix == ".bin":
                torch.load(path, weights_only=True)
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.name.endswith("-state"):
                assert resume_check.problems(path) == [], path

    def leftovers(self) -> list[str]:
        """Temporary files among images and results, except in the folders of runs."""
        return [str(p) for folder in (self.images, self.output) for p in folder.rglob(".*") if "runs" not in p.parts]

    def result(self) -> tuple[bytes, bytes]:
        """The bytes of the weights and of the saved state's model."""
        from safetensors.torch import load_file, save

        file = self.output / "m.safetensors"
        return save(load_file(file)), (self.output / "m-state" / "model.safetensors").read_bytes()

    def was_complete(self) -> bool:
        # killed after its result was written: the training then refuses to resume
        return "so nothing is left to do" in self.said()

    def said(self) -> str:
        return (self.place / "said.txt").read_text()

    def events(self) -> int:
        return len((self.place / "touched.txt").read_text().splitlines())

    def last(self) -> str:
        return (self.place / "touched.txt").read_text().splitlines()[-1]


if __name__ == "__main__":
    start = time.monotonic()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
