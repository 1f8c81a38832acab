"""Which saved file of a run is best: sample images side by side, held-out loss, likeness, copies, and a proposal."""
