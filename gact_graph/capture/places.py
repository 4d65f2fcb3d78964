"""The operations of a model whose results need no memory of their own.

Memory is only saved where earlier calls have shown that nothing but the next operation reads the
result, and where no code can reach the result that runs without a call of the function mode, such
as scripted functions, extensions, ``vmap`` and hooks: it is a variable of a layer of PyG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Places:
    """The operations, by label, whose results nothing but the next operation reads.

    Attributes:
        proven: Edge work whose result was gone after the next operation.
        refuted: Edge work and products whose result was not.
    """

    proven: set[str] = field(default_factory=set)
    refuted: set[str] = field(default_factory=set)

    def learn(self, label: str) -> None:
        """Count a call whose result only the next operation has read."""
        if label not in self.refuted:
            self.proven.add(label)

    def to_dict(self) -> dict[str, list[str]]:
        """Return plain values, ready for JSON."""
        return {"proven": sorted(self.proven), "refuted": sorted(self.refuted)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[str]]) -> Places:
        """Return the operations of :meth:`to_dict`. If they are those of other calls, results get
        their memory back as in the first call."""
        return cls({*values["proven"]}, {*values["refuted"]})

    def renamed(self, change: Callable[[str], str]) -> Places:
        """Return the same operations with other labels."""
        return Places({*map(change, self.proven)}, {*map(change, self.refuted)})

    def refute(self, label: str) -> None:
        """Count a call whose result another operation has read."""
        self.proven.discard(label)
        self.refuted.add(label)
