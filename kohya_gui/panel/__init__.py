"""The panel beside the tabs: a running or finished training."""
