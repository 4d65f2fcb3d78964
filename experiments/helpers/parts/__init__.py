"""One graph over several processes: trials, what is counted for more parts, and how it is shown."""
