"""Whether compiled blocks pay within the work that is left, in a training and for images."""

from dataclasses import dataclass

# Share of a pass that compiling saves over eager CUDA graphs: 22 % (SDXL) to 29 % (FLUX.1) on an H200.
SAVED_SHARE = 0.2
# The same for products in 8 bits, which eager blocks round slowly: compiling saves 72 % of an eager step of FLUX.1
# (flux/lora-24gb on an H200), and 58 % of the GPU's busy time.
SAVED_SHARE_8_BIT = 0.55
RECORD_PASSES = 10  # cost of recording a size in recorded passes: 24 of SDXL, 6 of FLUX.1 on an H200
CACHED_SHARE = 0.2  # of compile time with a full cache: 13 of 75 s (SDXL), 3.4 of 14.7 s (FLUX.1)
SWITCHING, LOADING, COMPILING = "switch to", "load from a warm cache", "compile first"


@dataclass(frozen=True)
class Payoff:
    """Whether compiled blocks save more time in the remaining steps than compiling costs; steps run eagerly so far."""

    steps: int  # that remain
    step_seconds: float  # of an eager step
    sizes: int  # image sizes, each of which is recorded again with compiled blocks
    loading: float = 0.0  # seconds of loading or compiling graphs, in which no step runs
    waiting: float = 0.0  # seconds before that, in which steps run eagerly
    share: float = SAVED_SHARE  # of an eager step that compiling saves

    @property
    def saved(self) -> float:
        return max(self.steps * self.step_seconds - self.waiting, 0.0) * self.share

    @property
    def cost(self) -> float:
        return self.loading + RECORD_PASSES * self.step_seconds * self.sizes

    @property
    def pays(self) -> bool:
        return self.saved > self.cost

    def refusal(self, what_costs: str) -> str:
        """Return the log line that says why blocks are not compiled; `what_costs` is one of the constants above."""
        after = f"start after about {self.waiting:.0f} s of compiling and " if self.waiting else ""
        return (
            f"Blocks are not compiled: of {self.steps} remaining steps (eager: {self.step_seconds:.3g} s each), "
            f"compiled ones would {after}save {self.saved:.0f} s, but cost {self.cost:.0f} s to "
            f"{what_costs}"
        )
