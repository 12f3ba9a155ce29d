"""Decomposable Attention: is one sentence implied by another? Parikh et al. 2016 (EMNLP, 1606.01933).

No recurrence and, without `Intra`, no order either: words are aligned, compared pair by pair, and summed.

    a = W_p x_i                                               projected word vectors, no bias
    f_ij = F_intra(a_i) . F_intra(a_j)                        intra-sentence attention, section 3.4 (optional)
    a'_i = sum_j softmax_j(f_ij + d_{i-j}) a_j,  a_i <- [a_i; a'_i]
    e_ij = F(a_i) . F(b_j)                                    attend, section 3.1: F a word, not a pair
    beta_i = sum_j softmax_j(e_ij) b_j,  alpha_j = sum_i softmax_i(e_ij) a_i
    v_1i = G([a_i; beta_i]),  v_2j = G([b_j; alpha_j])        compare, section 3.2
    y = H([sum_i v_1i; sum_j v_2j])                           aggregate, section 3.3: sums, not means
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError
from qkv.nn import Layout
from qkv.nn.build import build
from qkv.nn.scores import ScoreFunction, attend


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Section 5.1's. `far`: distances of more words than this share one bias of intra-sentence attention.

    `far` None leaves that attention out. `null`: a NULL word stands before each sentence, for words
    to align with that match nothing.
    """

    vocab: int
    vectors: int = 300
    width: int = 200
    classes: int = 3
    far: int | None = None
    null: bool = True
    dropout: float = 0.2
    std: float = 0.01
    learning_rate: float = 0.05
    accumulator: float = 0.1


def with_intra(vocab: int) -> Settings:
    """The paper's settings of the variant with intra-sentence attention."""
    return Settings(vocab=vocab, far=10, learning_rate=0.025)


class Judgement(NamedTuple):
    """What the model makes of a pair, and the weights it was made with.

    Row i of `to_hypothesis` says what premise word i was aligned with, row j of `to_premise` what
    hypothesis word j was; `within` are the two sentences' own, with intra-sentence attention. The
    NULL word is the first row and column where there is one.
    """

    logits: Float[Tensor, "batch classes"]
    to_hypothesis: Float[Tensor, "batch premise hypothesis"]
    to_premise: Float[Tensor, "batch hypothesis premise"]
    within: tuple[Float[Tensor, "batch premise premise"], Float[Tensor, "batch hypothesis hypothesis"]] | None


class DecomposableAttention(nn.Module):
    """The three steps. Word vectors are data: of unit length, and not among the parameters."""

    table: Tensor
    null: Tensor

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings
        width = settings.width
        wide = width if settings.far is None else 2 * width
        self.register_buffer("table", torch.empty(settings.vocab, settings.vectors))
        self.register_buffer("null", torch.empty(settings.vectors))
        self.project = nn.Linear(settings.vectors, width, bias=False)
        self.intra = None if settings.far is None else Intra(width, settings.far, settings.dropout)
        self.attend = two_layers(wide, width, settings.dropout)
        self.score = cast(ScoreFunction, build(spec.Dot(), width, width))
        self.compare = two_layers(2 * wide, width, settings.dropout)
        self.aggregate = two_layers(2 * width, width, settings.dropout)
        self.output = nn.Linear(width, settings.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Section 5.1: weights N(0, 0.01^2). Biases start at 0; vectors are random until they are given."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.settings.std)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.table)
        nn.init.normal_(self.null)
        self.use_vectors(self.table)
        self.null.copy_(F.normalize(self.null, dim=0))

    @torch.no_grad()
    def use_vectors(self, vectors: Float[Tensor, "vocab vectors"]) -> None:
        """Takes GloVe's vectors, or others of this size, made to be of unit length."""
        if vectors.shape != self.table.shape:
            got, must = tuple(vectors.shape), tuple(self.table.shape)
            raise RequestError(f"The word vectors are {got}; this model's must be {must}.")
        self.table.copy_(F.normalize(vectors, dim=-1))

    def forward(
        self,
        premise: Int[Tensor, "batch premise"],
        hypothesis: Int[Tensor, "batch hypothesis"],
        premise_present: Bool[Tensor, "batch premise"] | None = None,
        hypothesis_present: Bool[Tensor, "batch hypothesis"] | None = None,
    ) -> Judgement:
        """`present` is true where a word is; every word is there where it is not given."""
        a, a_there = self.words(premise, premise_present)
        b, b_there = self.words(hypothesis, hypothesis_present)
        within = None
        if self.intra is not None:
            (a, of_a), (b, of_b) = self.intra(a, a_there), self.intra(b, b_there)
            within = (of_a, of_b)

        scores = self.score(self.attend(a), self.score.prepared(self.attend(b)))
        beta, to_hypothesis = attend(scores, b, b_there[:, None])
        alpha, to_premise = attend(scores.transpose(1, 2), a, a_there[:, None])

        of_premise = total(self.compare(torch.cat([a, beta], -1)), a_there)
        of_hypothesis = total(self.compare(torch.cat([b, alpha], -1)), b_there)

        logits = self.output(self.aggregate(torch.cat([of_premise, of_hypothesis], -1)))
        return Judgement(logits, to_hypothesis, to_premise, within)

    def words(
        self, tokens: Int[Tensor, "batch words"], present: Bool[Tensor, "batch words"] | None
    ) -> tuple[Float[Tensor, "batch words width"], Bool[Tensor, "batch words"]]:
        """Projected vectors, after that of the NULL word where there is one, and where there are words."""
        there = torch.ones_like(tokens, dtype=torch.bool) if present is None else present
        vectors = self.table[tokens.masked_fill(~there, 0)]
        if self.settings.null:
            vectors = torch.cat([self.null.expand(len(tokens), 1, -1), vectors], 1)
            there = F.pad(there, (1, 0), value=True)
        return self.project(vectors), there

    def losses(self, judgement: Judgement, labels: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Cross-entropy of each pair, in nats. Section 3.3."""
        return F.cross_entropy(judgement.logits.float(), labels, reduction="none")

    def optimiser(self) -> torch.optim.Adagrad:
        """Adagrad as in section 5.1."""
        return torch.optim.Adagrad(
            self.parameters(),
            lr=self.settings.learning_rate,
            initial_accumulator_value=self.settings.accumulator,
        )


class Intra(nn.Module):
    """Each word beside a mixture of its own sentence, by content and by a bias a distance. Section 3.4.

    The only place where order enters. `distance` holds d_{-far} .. d_{far}, then one for all further.
    """

    def __init__(self, width: int, far: int, dropout: float):
        super().__init__()
        self.far = far
        self.attend = two_layers(width, width, dropout)
        self.score = cast(ScoreFunction, build(spec.Dot(), width, width))
        self.distance = nn.Parameter(torch.empty(2 * far + 2))

    def forward(
        self, a: Float[Tensor, "batch words width"], there: Bool[Tensor, "batch words"]
    ) -> tuple[Float[Tensor, "batch words wider"], Float[Tensor, "batch words words"]]:
        inner = self.attend(a)
        scores = self.score(inner, self.score.prepared(inner)) + self.distance[self.rows(there)]
        mixed, weights = attend(scores, a, there[:, None])
        return torch.cat([a, mixed], -1), weights

    def rows(self, there: Bool[Tensor, "batch words"]) -> Int[Tensor, "batch words words"]:
        """Of each pair (i, j) which bias it has: by i - j in words that are there, wherever padding is."""
        ahead = -Layout.padded(there).distances
        return torch.where(ahead.abs() > self.far, 2 * self.far + 1, ahead + self.far)


def two_layers(into: int, width: int, dropout: float) -> nn.Sequential:
    """The feed-forward networks F, F_intra, G and H: two layers of ReLU, with dropout before each."""
    return nn.Sequential(
        *(nn.Dropout(dropout), nn.Linear(into, width), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU()),
    )


def total(
    x: Float[Tensor, "batch words width"], there: Bool[Tensor, "batch words"]
) -> Float[Tensor, "batch width"]:
    """The sum over the words that are there: a mean would forget how many did not match."""
    return x.masked_fill(~there[..., None], 0).sum(1)
