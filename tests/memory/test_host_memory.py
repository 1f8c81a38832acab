"""Host memory that a GPU copies from."""

import pytest
import torch

from library.memory import host_memory


@pytest.mark.gpu
def test_pinned_memory_is_as_large_as_asked_for_and_given_back():
    def torchs_own():
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    torch.zeros(1, device="cuda")
    before = torchs_own()
    for _ in range(20):  # some of them where memory was pinned before
        memory = host_memory.pinned(5 * 2**20 + 256)
        assert memory.is_pinned() and memory[256:].is_pinned() and not memory.any()
        copied = torch.randn(1000, device="cuda")
        memory[:4000].view(torch.float32).copy_(copied, non_blocking=True)
        torch.cuda.synchronize()
        assert memory[:4000].view(torch.float32).equal(copied.cpu())
        del memory
    assert torchs_own() == before, "PyTorch's would be 8 MiB"


@pytest.mark.gpu
def test_memory_is_pinned_by_pytorch_where_the_driver_pins_no_other(monkeypatch):
    class Refuses:
        cudaError = torch.cuda.cudart().cudaError

        def cudaHostRegister(self, *_):  # noqa: N802 - CUDA's name
            return "an error"

    monkeypatch.setattr(torch.cuda, "cudart", Refuses)
    memory = host_memory.pinned(1000)
    assert memory.is_pinned() and len(memory) == 1000
    torch.zeros(1, device="cuda").add_(1)
