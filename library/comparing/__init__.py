"""Which saved file of a run is best: pictures side by side, held-out loss, likeness, copies, and a proposal."""
