"""Of several processes one compiles, and the others find what it made."""

import json

from tests.training import ranks

CODE = """
import json, sys
from collections import Counter
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters
from library import compile_utils
from library.compiler.plan import CompilePlan
from library.families.base import BlockInputs
from library.train.compiling.precompile import Precompiler
from library.train.compiling.trial_passes import TrialPasses
from tests.compile.test_compile_utils import options

class Block(torch.nn.Module):  # of products alone: inductor takes PyTorch's own, so that no C++ has to be compiled
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.inner(x)

def learn(*_):
    x = torch.ones(2, 8, 8)
    for block in model:
        x = block(x)
    x.sum().backward()


accelerator = Accelerator(cpu=True)
model, plan = torch.nn.ModuleList([Block(), Block()]), CompilePlan()
inputs = {"Block": BlockInputs(streams=(0,), dynamic=((0, 1),))}
compile_utils.compile_model(options(compile_backend="inductor"), model, [list(model)], inputs=inputs, plan=plan)
chosen = SimpleNamespace(
    ahead=True, dynamic=None, records_graphs=False, compile_fallback=False, compile_cache_size_limit=0,
    compile_compare_steps=0,
)
world = SimpleNamespace(accelerator=accelerator, device=torch.device("cpu"))
journal = SimpleNamespace(phase=lambda *_: None, say=lambda *_: None, event=lambda *_, **__: None)
loss = SimpleNamespace(warm_up=learn, compile_log=plan.log, components=SimpleNamespace(denoiser=model))
clock = SimpleNamespace(step=0, total=1, done=False)
example = SimpleNamespace(bucket="64x64")
batches = SimpleNamespace(kinds=lambda: Counter({(2, 8, 8): 1}), example=lambda kind: example, shapes={(8, 8): 1})
chosen.why_not_in_background, chosen.compile_warmup = lambda config: "not asked for", "true"
config = SimpleNamespace(compile=chosen, distributed=SimpleNamespace(fsdp=False))
Precompiler(config, world, journal, plan, clock).prepare(TrialPasses(batches, loss, world.device, lambda: None))
found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
print(json.dumps(found | {"rank": accelerator.process_index, "hits": plan.log.summary()["cache_hits"]}))
"""


def test_one_process_compiles_first_and_the_others_find_its_graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    said = [process.communicate()[0] for process in ranks(["-c", CODE])]
    first, second = (json.loads(words.splitlines()[-1]) for words in said)
    assert (first["rank"], first["hit"], first["miss"]) == (0, 0, 1)
    assert (second["rank"], second["hit"], second["miss"]) == (1, 1, 0)
    assert second["hits"] > 0 == first["hits"]
