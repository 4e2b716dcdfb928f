"""Token embedding and output head, with the vocabulary shared out over the ranks."""

from __future__ import annotations

from torch import Tensor

from interlock.layers.projection import Build, Projection, Shapes
from interlock.weights.source import WeightSource


class VocabEmbedding:
    """Rows of a [V, H] table. A rank looks up the tokens that it has; the sum is everybody's."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, build: Build) -> None:
        self.name = name
        self._shape = (vocab_size, hidden_size)
        self._build = build
        self._start, self._stop = build.tp.share(vocab_size)
        self.weight: Tensor

    def expected(self) -> Shapes:
        return {self.name: self._shape}

    def load(self, source: WeightSource) -> None:
        rows = source.get(self.name).part(0, self._start, self._stop)
        self.weight = rows.dense(self._build.dtype).to(self._build.device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """``token_ids`` [T] to [T, H]."""
        if self._build.tp.size == 1:
            return self.weight[token_ids]
        mine = (token_ids >= self._start) & (token_ids < self._stop)
        rows = self.weight[(token_ids - self._start).clamp(0, len(self.weight) - 1)]
        return self._build.tp.all_reduce(rows.masked_fill(~mine[:, None], 0))


class Head:
    """Logits of all tokens from final hidden states; every rank gets all of them."""

    def __init__(self, name: str, weight: str, hidden: int, vocab: int, build: Build) -> None:
        self._build = build
        self._sizes = build.tp.sizes(vocab)
        self.vocab_size = vocab
        self.projection = Projection(name, hidden, [(weight, vocab)], build, shard="out")

    def expected(self) -> Shapes:
        return self.projection.expected()

    def load(self, source: WeightSource) -> None:
        self.projection.load(source)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``hidden`` [S, H] to logits [S, V] in the model's dtype."""
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        return self._build.tp.all_gather(self.projection(hidden), self._sizes)
