"""Running, queued and finished trainings: the panel beside the tabs, and the queue."""
