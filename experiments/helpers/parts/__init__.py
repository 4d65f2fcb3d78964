"""One graph over several processes: counts for more parts, tables and a picture."""
