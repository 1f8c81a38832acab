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
from library.compiler.log import CompileLog
from library.families.base import BlockInputs
from library.train.compiling.precompile import Precompiler
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
model, log = torch.nn.ModuleList([Block(), Block()]), CompileLog()
inputs = {"Block": BlockInputs(streams=(0,), dynamic=((0, 1),))}
compile_utils.compile_model(options(compile_backend="inductor"), model, [list(model)], inputs=inputs, log=log)
chosen = SimpleNamespace(
    ahead=True, dynamic=None, records_graphs=False, compile_fallback=False, compile_cache_size_limit=0,
    compile_compare_steps=0,
)
world = SimpleNamespace(accelerator=accelerator, device=torch.device("cpu"))
journal = SimpleNamespace(phase=lambda *_: None, say=lambda *_: None, event=lambda *_, **__: None)
loss = SimpleNamespace(warm_up=learn, unwrapped=lambda: loss)
clock = SimpleNamespace(step=0, total=1, done=False)
example = SimpleNamespace(bucket="64x64")
batches = SimpleNamespace(kinds=lambda: Counter({(2, 8, 8): 1}), example=lambda kind: example, shapes={(8, 8): 1})
config = SimpleNamespace(compile=chosen, distributed=SimpleNamespace(fsdp=False))
precompiler = Precompiler(config, world, journal, log, clock)
precompiler.run_ahead(batches, loss, lambda: None)
found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
print(json.dumps(found | {"rank": accelerator.process_index, "hits": log.summary()["cache_hits"]}))
"""


def test_one_process_compiles_first_and_the_others_find_its_graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    said = [process.communicate()[0] for process in ranks(["-c", CODE])]
    first, second = (json.loads(words.splitlines()[-1]) for words in said)
    assert (first["rank"], first["hit"], first["miss"]) == (0, 0, 1)
    assert (second["rank"], second["hit"], second["miss"]) == (1, 1, 0)
    assert second["hits"] > 0 == first["hits"]
