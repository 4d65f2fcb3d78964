"""The shared parts of the commands: training, measuring, results and pictures."""
