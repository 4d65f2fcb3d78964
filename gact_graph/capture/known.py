"""The contexts of one forward that live: what is saved again is not encoded again."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from gact_graph.capture.elements import Elements
from gact_graph.capture.ledger import Entry
from gact_graph.codecs import Context
from gact_graph.codecs.reads import VALUES, Reads, Values

Found = tuple[weakref.ref[Context], Entry]


class KnownContexts:
    """Finds the context of elements that were saved before. It keeps none of them alive.

    Their entries hold the keys of their storages, so that no other storage is taken for one.
    """

    def __init__(self) -> None:
        self._by_elements: dict[Hashable, dict[Reads | None, Found]] = {}
        self._by_content: dict[Hashable, list[weakref.ref[Context]]] = {}

    def find(self, elements: Elements, reads: Reads) -> tuple[Context, Entry] | None:
        """The context of these elements and its entry, if it will do for what backward reads."""
        known = self._by_elements.get(elements.identity)
        if known is None:
            return None
        for key in (None, reads):
            if key in known:
                reference, entry = known[key]
                context = reference()
                if context is not None:
                    return context, entry
        return None

    def add(self, elements: Elements, reads: Reads, context: Context, entry: Entry) -> None:
        """Remembers a context for as long as it lives."""
        found = weakref.ref(context), entry
        # Exact ones serve every backward, others only those that read the same.
        exact = context.encoded.exact
        known = self._by_elements.setdefault(elements.identity, {})
        known[None if exact else reads] = found
        if isinstance(reads, Values):  # what serves special demands serves plain values, too
            known[VALUES] = found

    def equal_to(self, context: Context) -> Context | None:
        """An earlier context with the same content, made from another tensor.

        Layers make some constants anew that are equal in all of them: edges with self-loops, the
        normalised weights of a GCN.
        """
        mark = context.encoded.fingerprint()
        if mark is None:
            return None
        others = self._by_content.setdefault(mark, [])
        for other in filter(None, (reference() for reference in others)):
            if context.encoded.equals(other.encoded):
                return other
        others.append(weakref.ref(context))
        return None
