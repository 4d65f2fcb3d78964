"""Small helpers that any room may use, and that import no other room.

Here: the identity of storages, replicas of modules, methods replaced on one instance, random and
autocast state, warnings, freed memory on a CPU. Not here: anything that belongs to one room alone.
"""
