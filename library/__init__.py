"""Training of image models: configs, families, data, learners, the step, and the runs it leaves behind."""
