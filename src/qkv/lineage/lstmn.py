"""Long Short-Term Memory-Networks: an LSTM with a tape in place of a cell. Cheng et al. 2016 (1601.06733).

Every token keeps its own hidden state h_i and memory c_i; at each step attention over the tokens
before it, never itself and never later ones, says what the LSTM takes for its past (section 3.2):

    a_i = v . tanh(W_h h_i + W_x x_t + W_h~ h~_{t-1}),  i < t
    s = softmax(a)
    [h~_t; c~_t] = sum_i s_i [h_i; c_i]                      one weighting for both tapes
    [i; f; o; c^] = [sigma; sigma; sigma; tanh](W [h~_t; x_t])
    c_t = f * c~_t + i * c^,  h_t = o * tanh(c_t)

Two sentences (section 4): the target's reader attends to the source's tapes too. Shallow fusion puts
ordinary attention before a plain reader. Deep fusion reads the source's memory tape into the cell:

    b_j = u . tanh(W_g g_j + W_x x_t + W_g~ g~_{t-1}),  p = softmax(b)
    [g~_t; m~_t] = sum_j p_j [g_j; m_j]                      g, m: the source's hidden and memory tapes
    r = sigma(W_r [g~_t; x_t])
    c_t = r * m~_t + f * c~_t + i * c^

Memory grows with the length, time with its square, and the steps are sequential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError
from qkv.nn.build import build
from qkv.nn.scores import ScoreFunction, attend


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Those of language modelling on the Penn Treebank (section 5.1).

    `feedback`: whether h~_{t-1} takes part in the score, as in the paper; the authors' released
    encoder leaves it out, their decoder does not, nor do decoders here. Trained by SGD whose rate is
    multiplied by `decay` after an epoch that does not help, gradients of at most `clip` in norm.
    """

    vocab: int = 10_000
    width: int = 150
    cell: int = 300
    layers: int = 1
    feedback: bool = True
    init: float = 0.05
    learning_rate: float = 0.65
    decay: float = 0.85
    clip: float = 5.0
    batch: int = 40


@dataclass(frozen=True, kw_only=True)
class PairSettings(Settings):
    """An encoder-decoder's: `vocab` is the source's, and the decoder's reader has as many layers."""

    target_vocab: int
    fusion: Literal["shallow", "deep"] = "deep"


class Tape(NamedTuple):
    """What one layer has read. The first slot is of zeros and never visible: the first token sees nothing.

    (The authors' released code shows that slot to later tokens too; the paper's sums are over tokens.)
    `cells` are hidden and memory tape side by side, `keys` what the score has made of the hidden one.
    """

    cells: Float[Tensor, "batch slots twice_cell"]
    keys: Float[Tensor, "batch slots cell"]
    there: Bool[Tensor, "batch slots"]
    last: Float[Tensor, "batch cell"]  # h~ of the latest token


class LSTMNLayer(nn.Module):
    """One tape and its recurrence. `score` may be any score function of [x; h~] (or x) and h."""

    def __init__(self, into: int, cell: int, feedback: bool = True):
        super().__init__()
        self.cell, self.feedback = cell, feedback
        asked = into + cell if feedback else into
        self.score = cast(ScoreFunction, build(spec.Additive(cell), asked, cell))
        self.of_input = nn.Linear(into, 4 * cell)
        self.of_tape = nn.Linear(cell, 4 * cell, bias=False)

    def begin(self, like: Float[Tensor, "batch any"]) -> Tape:
        """A tape on which nothing stands, for as many rows."""
        batch = len(like)
        hidden = like.new_zeros(batch, 1, self.cell)
        there = torch.zeros(batch, 1, dtype=torch.bool, device=like.device)
        return Tape(torch.cat([hidden, hidden], -1), self.score.prepared(hidden), there, hidden[:, 0])

    def step(
        self,
        x: Float[Tensor, "batch into"],
        tape: Tape,
        there: Bool[Tensor, " batch"],
        beside: Float[Tensor, "batch cell"] | None = None,
        given: Float[Tensor, "batch four_cells"] | None = None,
    ) -> tuple[Float[Tensor, "batch cell"], Float[Tensor, "batch slots"], Tape]:
        """h_t, the weights over the slots, and the tape with one more.

        Where a token is not `there` (padding), no later one sees it. `beside` is added to c_t;
        `given` is `of_input(x)`, where it has been made for all tokens at once.
        """
        query = torch.cat([x, tape.last], -1) if self.feedback else x
        mixed, weights = attend(self.score(query[:, None], tape.keys), tape.cells, tape.there[:, None])
        hidden_before, memory_before = mixed[:, 0].chunk(2, -1)

        given = self.of_input(x) if given is None else given
        i, f, o, new = (given + self.of_tape(hidden_before)).chunk(4, -1)
        memory = f.sigmoid() * memory_before + i.sigmoid() * new.tanh()
        if beside is not None:
            memory = memory + beside
        hidden = o.sigmoid() * memory.tanh()

        cells = torch.cat([hidden, memory], -1)[:, None]
        longer = Tape(
            torch.cat([tape.cells, cells], 1),
            torch.cat([tape.keys, self.score.prepared(hidden[:, None])], 1),
            torch.cat([tape.there, there[:, None]], 1),
            torch.where(there[:, None], hidden_before, tape.last),
        )
        return hidden, weights[:, 0], longer

    def forward(
        self, x: Float[Tensor, "batch length into"], present: Bool[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch length cell"], Float[Tensor, "batch length length"], Tape]:
        """All tokens in order: hidden states, the weights of each over all, and the tape."""
        tape, hidden, maps = self.begin(x[:, 0]), [], []
        steps = zip(x.unbind(1), self.of_input(x).unbind(1), present.unbind(1), strict=True)
        for word, given, there in steps:
            h, weights, tape = self.step(word, tape, there, given=given)
            hidden.append(h)
            maps.append(among(weights, x.shape[1]))
        return torch.stack(hidden, 1), torch.stack(maps, 1), tape


def among(weights: Float[Tensor, "batch slots"], length: int) -> Float[Tensor, "batch length"]:
    """Weights over the slots as weights over all tokens: no first slot, zeros for what is not read yet."""
    return F.pad(weights[:, 1:], (0, length - weights.shape[1] + 1))


class Reading(NamedTuple):
    """What a reader made of a sequence: of the last layer the states, of every layer weights and tape."""

    hidden: Float[Tensor, "batch length cell"]
    weights: Float[Tensor, "batch layers length length"]
    tapes: tuple[Tape, ...]


class LSTMN(nn.Module):
    """Layers on top of one another: a token's hidden state is the next layer's input. Section 3.2."""

    def __init__(self, into: int, cell: int, layers: int, feedback: bool = True):
        super().__init__()
        sizes = [into] + [cell] * (layers - 1)
        self.layers = nn.ModuleList(LSTMNLayer(size, cell, feedback) for size in sizes)

    def begin(self, like: Float[Tensor, "batch any"]) -> tuple[Tape, ...]:
        return tuple(cast(LSTMNLayer, layer).begin(like) for layer in self.layers)

    def step(
        self, x: Float[Tensor, "batch into"], tapes: tuple[Tape, ...]
    ) -> tuple[Float[Tensor, "batch cell"], tuple[Tape, ...]]:
        """The last layer's h_t of one more token, which is there in every row."""
        longer, there = [], x.new_ones(len(x), dtype=torch.bool)
        for layer, tape in zip(self.layers, tapes, strict=True):
            x, _, tape = cast(LSTMNLayer, layer).step(x, tape, there)
            longer.append(tape)
        return x, tuple(longer)

    def forward(
        self, x: Float[Tensor, "batch length into"], present: Bool[Tensor, "batch length"]
    ) -> Reading:
        maps, tapes = [], []
        for layer in self.layers:
            x, weights, tape = layer(x, present)
            maps.append(weights)
            tapes.append(tape)
        return Reading(x, torch.stack(maps, 1), tuple(tapes))


# --- one sequence -------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """The next token from the hidden state of the last layer. Section 5.1."""

    def __init__(self, settings: Settings = Settings()):
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocab, settings.width)
        self.reader = LSTMN(settings.width, settings.cell, settings.layers, settings.feedback)
        self.output = nn.Linear(settings.cell, settings.vocab)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _uniform(self, self.settings.init)

    def read(
        self, tokens: Int[Tensor, "batch length"], present: Bool[Tensor, "batch length"] | None = None
    ) -> Reading:
        """The states, and who looked at whom: `weights`. `present` is true where a token is."""
        _check(tokens)
        there = torch.ones_like(tokens, dtype=torch.bool) if present is None else present
        return cast(Reading, self.reader(self.embedding(tokens.masked_fill(~there, 0)), there))

    def forward(
        self, tokens: Int[Tensor, "batch length"], present: Bool[Tensor, "batch length"] | None = None
    ) -> Float[Tensor, "batch length vocab"]:
        """Logits of the token after each."""
        return cast(Tensor, self.output(self.read(tokens, present).hidden))

    def losses(
        self, tokens: Int[Tensor, "batch length"], present: Bool[Tensor, "batch length"] | None = None
    ) -> Float[Tensor, "batch shorter"]:
        """-log p of every token but the first, in nats; 0 where it is padding."""
        there = torch.ones_like(tokens, dtype=torch.bool) if present is None else present
        logits = self(tokens[:, :-1], there[:, :-1]).float()
        wanted = tokens[:, 1:].masked_fill(~there[:, 1:], 0)
        return F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none") * there[:, 1:]

    def begin(self, batch: int) -> tuple[Tape, ...]:
        """The state before any token."""
        return self.reader.begin(self.output.weight.new_empty(batch, 0))

    def next(
        self, state: tuple[Tape, ...], tokens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch vocab"], tuple[Tape, ...]]:
        """Logits of the token after these, and the state that has read them."""
        hidden, state = self.reader.step(self.embedding(tokens), state)
        return self.output(hidden), state


# --- two sequences ------------------------------------------------------------------------------


class Source(NamedTuple):
    """One layer's tapes of a source, as a target's reader attends to them."""

    cells: Float[Tensor, "batch source twice_cell"]
    keys: Float[Tensor, "batch source cell"]
    there: Bool[Tensor, "batch source"]


def _source(tape: Tape, score: ScoreFunction) -> Source:
    """The whole tape without its first slot; keys are this score's own."""
    cells, there = tape.cells[:, 1:], tape.there[:, 1:]
    return Source(cells, score.prepared(cells.chunk(2, -1)[0]), there)


class ShallowState(NamedTuple):
    source: Source
    hidden: Float[Tensor, "batch cell"]  # h_{t-1} of the last layer
    tapes: tuple[Tape, ...]


class Shallow(nn.Module):
    """Shallow fusion: a context of the source beside each word, read by a plain LSTMN. Section 4.

    Context as in Bahdanau et al. 2014: its query is the state before, its values hidden states.
    """

    def __init__(self, settings: PairSettings):
        super().__init__()
        cell = settings.cell
        self.score = cast(ScoreFunction, build(spec.Additive(cell), cell, cell))
        self.reader = LSTMN(settings.width + cell, cell, settings.layers)

    def begin(self, encoded: Reading) -> ShallowState:
        like = encoded.hidden[:, 0]
        source = _source(encoded.tapes[-1], self.score)
        return ShallowState(source, torch.zeros_like(like), self.reader.begin(like))

    def step(
        self, x: Float[Tensor, "batch width"], state: ShallowState
    ) -> tuple[Float[Tensor, "batch cell"], Float[Tensor, "batch source"], ShallowState]:
        source, before, tapes = state
        values, _ = source.cells.chunk(2, -1)
        scores = self.score(before[:, None], source.keys)
        context, weights = attend(scores, values, source.there[:, None])
        hidden, tapes = self.reader.step(torch.cat([x, context[:, 0]], -1), tapes)
        return hidden, weights[:, 0], ShallowState(source, hidden, tapes)


class DeepState(NamedTuple):
    sources: tuple[Source, ...]
    lasts: tuple[Float[Tensor, "batch cell"], ...]  # g~_{t-1} of each layer
    tapes: tuple[Tape, ...]


class Deep(nn.Module):
    """Deep fusion: every layer's cell takes in the memory tape of the source's same layer. Section 4."""

    def __init__(self, settings: PairSettings):
        super().__init__()
        cell, layers = settings.cell, settings.layers
        self.reader = LSTMN(settings.width, cell, layers)
        sizes = [settings.width] + [cell] * (layers - 1)
        self.fusions = nn.ModuleList(Fusion(size, cell) for size in sizes)

    def begin(self, encoded: Reading) -> DeepState:
        like = encoded.hidden[:, 0]
        sources = tuple(
            _source(tape, cast(Fusion, fusion).score)
            for tape, fusion in zip(encoded.tapes, self.fusions, strict=True)
        )
        return DeepState(sources, (torch.zeros_like(like),) * len(sources), self.reader.begin(like))

    def step(
        self, x: Float[Tensor, "batch width"], state: DeepState
    ) -> tuple[Float[Tensor, "batch cell"], Float[Tensor, "batch source"], DeepState]:
        """The weights are the last layer's."""
        lasts, tapes, there = [], [], x.new_ones(len(x), dtype=torch.bool)
        parts = zip(self.reader.layers, self.fusions, *state, strict=True)
        for layer, fusion, source, last, tape in parts:
            beside, last, weights = fusion(x, last, source)
            x, _, tape = cast(LSTMNLayer, layer).step(x, tape, there, beside)
            lasts.append(last)
            tapes.append(tape)
        return x, weights, DeepState(state.sources, tuple(lasts), tuple(tapes))


class Fusion(nn.Module):
    """Inter-attention of one layer: p over the source's tapes, and r * m~, what the cell takes in."""

    def __init__(self, into: int, cell: int):
        super().__init__()
        self.score = cast(ScoreFunction, build(spec.Additive(cell), into + cell, cell))
        self.gate = nn.Linear(cell + into, cell)

    def forward(
        self, x: Float[Tensor, "batch into"], last: Float[Tensor, "batch cell"], source: Source
    ) -> tuple[Float[Tensor, "batch cell"], Float[Tensor, "batch cell"], Float[Tensor, "batch source"]]:
        """r * m~_t, g~_t, and the weights."""
        scores = self.score(torch.cat([x, last], -1)[:, None], source.keys)
        mixed, weights = attend(scores, source.cells, source.there[:, None])
        hidden, memory = mixed[:, 0].chunk(2, -1)
        gate = self.gate(torch.cat([hidden, x], -1)).sigmoid()
        return gate * memory, hidden, weights[:, 0]


FUSIONS: dict[str, type[Shallow] | type[Deep]] = {"shallow": Shallow, "deep": Deep}
State = ShallowState | DeepState


class EncoderDecoder(nn.Module):
    """Two readers, the second of which also attends to the first. A `translation.Translator`. Section 4."""

    def __init__(self, settings: PairSettings):
        super().__init__()
        self.settings = settings
        self.source = nn.Embedding(settings.vocab, settings.width)
        self.target = nn.Embedding(settings.target_vocab, settings.width)
        self.encoder = LSTMN(settings.width, settings.cell, settings.layers, settings.feedback)
        self.decoder = FUSIONS[settings.fusion](settings)
        self.output = nn.Linear(settings.cell, settings.target_vocab)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _uniform(self, self.settings.init)

    def begin(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> State:
        _check(source)
        encoded = self.encoder(self.source(source.masked_fill(~present, 0)), present)
        return self.decoder.begin(encoded)

    def next(self, state: State, tokens: Int[Tensor, " batch"]) -> tuple[Float[Tensor, "batch vocab"], State]:
        hidden, _, state = self.decoder.step(self.target(tokens), state)  # type: ignore[arg-type]
        return self.output(hidden), state

    def forward(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target vocab"]:
        return cast(Tensor, self.output(self._read(source, present, target)[0]))

    def alignment(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target source"]:
        """Of the last layer, where fusion is deep."""
        return self._read(source, present, target)[1]

    def _read(self, source: Tensor, present: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        state, states, maps = self.begin(source, present), [], []
        for word in self.target(target).unbind(1):
            hidden, weights, state = self.decoder.step(word, state)  # type: ignore[arg-type]
            states.append(hidden)
            maps.append(weights)
        return torch.stack(states, 1), torch.stack(maps, 1)


@torch.no_grad()
def _uniform(module: nn.Module, most: float) -> None:
    """U(-most, most): the option of the authors' released code; the paper does not say."""
    for parameter in module.parameters():
        parameter.uniform_(-most, most)


def _check(tokens: Tensor) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise RequestError(f"Tokens must be (batch, length), both at least 1; got {tuple(tokens.shape)}.")
