"""A cache of the contexts of one forward: elements that are saved again are not encoded again."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from gact_graph.capture.ledger import Entry
from gact_graph.codecs import Context
from gact_graph.codecs.reads import VALUES, Reads, Values
from gact_graph.support.storage import Elements


class ContextCache:
    """Finds the context of elements that were saved before, without keeping it alive.

    Its entry holds the key of the storage, so that no other storage is confused with it.
    """

    def __init__(self) -> None:
        self._by_elements: dict[
            Hashable, dict[Reads | None, tuple[weakref.ref[Context], Entry]]
        ] = {}
        self._by_content: dict[Hashable, list[weakref.ref[Context]]] = {}

    def find(self, elements: Elements, reads: Reads) -> tuple[Context, Entry] | None:
        """Return a context of these elements that suffices for ``reads``, and its entry."""
        by_reads = self._by_elements.get(elements.identity, {})
        for key in (None, reads):
            if key in by_reads:
                reference, entry = by_reads[key]
                context = reference()
                if context is not None:
                    return context, entry
        return None

    def add(self, elements: Elements, reads: Reads, context: Context, entry: Entry) -> None:
        """Add a context for as long as it lives."""
        pair = weakref.ref(context), entry
        # Exact contexts serve every backward, others only those that read the same.
        exact = context.sample.exact
        by_reads = self._by_elements.setdefault(elements.identity, {})
        by_reads[None if exact else reads] = pair
        if isinstance(reads, Values):  # values with special demands also serve plain values
            by_reads[VALUES] = pair

    def equal_to(self, context: Context) -> Context | None:
        """Return an earlier context with equal contents, made from another tensor.

        Layers recompute constants that are equal in all of them: edges with self-loops, the
        normalized weights of a GCN.
        """
        fingerprint = context.encoded.fingerprint()
        if fingerprint is None:
            return None
        others = self._by_content.setdefault(fingerprint, [])
        for other in filter(None, (reference() for reference in others)):
            if context.encoded.equals(other.encoded):
                return other
        others.append(weakref.ref(context))
        return None
