"""Small helpers that any room may use, and that import no other room.

Here: the session of a thread, the identity and layout of storages, patched methods, random and
autocast state, the state that code reaches, warnings, peak memory, and freed memory on a CPU.
Not here: anything that belongs to one room alone.
"""
