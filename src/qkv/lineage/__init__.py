"""The models before and around the Transformer, each complete in one file that reads beside its paper.

They share what they have in common (score functions, the masked softmax, positions, the layers of
`qkv.nn`), so that what each of them brought is what its file says. A file's docstring names the
paper, its sections and what other sources were followed where the paper is silent; its
`Hyperparameters` are the paper's; its objective is there where the paper has one of its own.
Importing this package imports no torch; importing a file does.

    file               year  what it brought
    ram                2014  hard attention: a network that chooses where to look, by REINFORCE
    bahdanau           2014  soft attention: a decoder that reads every source state, additive scores
    memory_network     2015  attention read several times, over sentences, with learned places
    luong              2015  dot, general, concat and location scores; global and local attention
    lstmn              2016  attention inside one sentence, over an LSTM's own past
    decomposable       2016  attention and feed-forward maps alone, no recurrence
    convs2s            2017  convolutions with attention in every decoder layer, learned positions
    transformer        2017  attention as the only way tokens meet: many heads, sinusoids
    transformer_xl     2019  segments that remember the one before, relative positions

    translation              what the sequence-to-sequence models share: a protocol, greedy and beam search
"""
