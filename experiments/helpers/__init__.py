"""What the commands of :mod:`experiments` share: training, measuring, results and pictures."""
