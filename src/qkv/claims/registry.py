"""The claims, in the order of their numbers. No torch: the experiments are imported when they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from qkv.claims.claim import Claim
from qkv.errors import RequestError

_CLAIMS = (
    Claim(
        name="glimpses",
        number="H1",
        statement="Who learns where to look errs less than who looks anywhere, or sees all at once.",
        source="Mnih et al. 2014, section 4.1",
        expectation=(
            "RAM: digits ×2 pasted at random in 32×32 + 4 clutter crops; 8×8, 2–3 scales, T=1..6, σ=.15, 40 "
            "epochs (~5 min). Expect: error falls with T; learned < random locations (paper: 4.04 vs "
            "14.4 %); FC net suffers under clutter (11.96). Paper MNIST 2→7 glimpses: 3.79→1.07 (NIPS; arXiv "
            "v1 prints 1.29 for 6)."
        ),
        experiment="glimpses",
    ),
    Claim(
        name="copy-by-length",
        number="H2",
        statement="One vector cannot hold a long sentence; a search through the source needs no such vector.",
        source="Bahdanau et al. 2014, section 5",
        expectation=(
            "Bahdanau: copy/reverse, vocab 20, length 1–30, GRU 64, 3k steps. Expect exact match by length "
            "bucket: encdec collapses after ~10–15, search >95 % to 30; α diagonal / anti-diagonal. Stay "
            "within trained lengths."
        ),
        experiment="copy_by_length",
    ),
    Claim(
        name="attention-variants",
        number="H3",
        statement="A window on the source must learn where to be; telling the next step what was read helps.",
        source="Luong et al. 2015, sections 3 and 5",
        expectation=(
            "Luong: target = source with each symbol repeated 1–3×: local-m drifts, local-p |p_t−truth|<1, "
            "global ≈ local-p; dot/general/concat table; input feeding cuts repeats."
        ),
        experiment="attention_variants",
    ),
    Claim(
        name="tape-or-cell",
        number="H4",
        statement="An LSTM that attends to its own past recalls across gaps where a single cell forgets.",
        source="Cheng et al. 2016, section 3",
        expectation=(
            "LSTMN vs LSTM at equal parameters: key–value recall with gaps 5–40: LSTM decays with gap, LSTMN "
            "flat."
        ),
        experiment="tape_or_cell",
    ),
    Claim(
        name="word-alignment",
        number="H5",
        statement="Aligned words are enough for much inference, and blind to order unless told distances.",
        source="Parikh et al. 2016, sections 3 and 5",
        expectation=(
            "Decomposable: templated NLI (all/some/no, hypernyms, negation), 20k pairs, 2 min: >95 % "
            "lexical; exactly chance on agent/patient swaps unless intra+distance bias."
        ),
        experiment="word_alignment",
    ),
    Claim(
        name="memory-hops",
        number="H6",
        statement="What two sentences say together takes several readings, and order takes positions.",
        source="Sukhbaatar et al. 2015, section 4; tasks of Weston et al. 2015",
        expectation=(
            "MemN2N: generated bAbI tasks 1, 2, 4 with 1k stories: 1→3 hops fixes task 2; PE vs BoW fixes "
            'task 4; no T_A fails "latest location"; LS on/off.'
        ),
        experiment="memory_hops",
    ),
    Claim(
        name="blind-to-order",
        number="H7",
        statement="Convolutions need positions little, self-attention entirely.",
        source="Gehring et al. 2017, section 5.4; Vaswani et al. 2017, section 3.5",
        expectation="ConvS2S: reverse/copy; ± positions: small loss; Transformer without positions: chance.",
        experiment="blind_to_order",
    ),
    Claim(
        name="reverse-and-map",
        number="H8",
        statement="A small Transformer maps rows exactly; smoothed labels cost likelihood, not accuracy.",
        source="Vaswani et al. 2017, sections 3 and 5.4",
        expectation=(
            "Transformer: reverse + vocab map, 2+2 layers d=64, 2k steps: >99 % exact; label smoothing: "
            "higher NLL, same/better accuracy; floor .778."
        ),
        experiment="reverse_and_map",
    ),
    Claim(
        name="unscaled-scores",
        number="H9",
        statement="Without the factor 1/sqrt(d_k) the softmax is saturated from the start and learns slower.",
        source="Vaswani et al. 2017, section 3.2.1",
        expectation="No √d_k, d_k=256: init softmax entropy ≈0, tiny Q/K gradients, slower loss.",
        experiment="unscaled_scores",
    ),
    Claim(
        name="word-order",
        number="H10",
        statement="Attention without positions sees a set: it cannot tell which of two tokens came first.",
        source="Vaswani et al. 2017, section 3.5; without a position but causal: Haviv et al. 2022",
        expectation=(
            '"aXb vs bXa" classification with MEAN POOLING (reading the last token leaks its identity): '
            "NoPE encoder 50 %, any PE 100 %, causal NoPE ≈100 %."
        ),
        experiment="word_order",
    ),
    Claim(
        name="extrapolation",
        number="H11",
        statement="Trained on short texts, some position schemes can read longer ones and others cannot.",
        source="Press et al. 2022, figure 1; Kazemnejad et al. 2023",
        expectation=(
            "learned unusable; sinusoidal breaks first, RoPE next; T5/Shaw/ALiBi flat; ALiBi falls "
            "non-overlapping, flat sliding."
        ),
        experiment="extrapolation",
    ),
    Claim(
        name="longer-rotary",
        number="H12",
        statement="Rotary positions can be stretched to four times the length with little or no training.",
        source="Chen et al. 2023; bloc97 2023; Peng et al. 2023",
        expectation=(
            "Extending RoPE 64→256: raw ≫; zero-shot YaRN/NTK < PI; 100–200 fine-tune steps: PI≈YaRN < NTK. "
            "**Set base to (L/2π)^{64/41}** to copy LLaMA's share of unrotated dims (23/64): L=64→37, "
            "128→111, 256→326 [c]; with 10⁴, 11 of 16 dims never turn at d_h=32, L=64. β_fast=32 is never "
            "reached (L/2π=20.4 at L=128): use ≈8."
        ),
        experiment="longer_rotary",
    ),
    Claim(
        name="segment-memory",
        number="H13",
        statement="A Transformer that keeps the states of the segments before reads far beyond its segment.",
        source="Dai et al. 2019, sections 3.2 and 4",
        expectation=(
            "Transformer-XL: segments of 32, planted copy 40–90 back: vanilla chance, XL solves up to ~N·M; "
            "longer eval memory helps; absolute PE + memory hurts; cached evaluation ≫ sliding recompute."
        ),
        experiment="segment_memory",
    ),
    Claim(
        name="head-roles",
        number="H14",
        statement="Heads have roles one can tell from their weights, and most can be removed at little cost.",
        source="Voita et al. 2019; Michel et al. 2019; Clark et al. 2019",
        expectation="Heads: previous-token, separator, induction scores; ablate each; few matter.",
        experiment="head_roles",
    ),
    Claim(
        name="norm-placement",
        number="H15",
        statement="A deep post-norm Transformer needs a warm-up of its learning rate; pre-norm does not.",
        source="Xiong et al. 2020",
        expectation=(
            "Norm: 12 layers d=64, lr 1e-3…3e-3, no warm-up: post-LN stalls/diverges, with warm-up fine; "
            "pre-LN fine; log init gradient norms."
        ),
        experiment="norm_placement",
    ),
    Claim(
        name="mask-leak",
        number="H16",
        statement="A mask that shows the future gives a perfect training loss and a useless model.",
        source="Vaswani et al. 2017, section 3.2.3",
        expectation=(
            "Leak: remove mask or diagonal=1: training loss → ~0, samples garbage, correct-mask loss far "
            "above baseline; Jacobian test fails."
        ),
        experiment="mask_leak",
    ),
    Claim(
        name="induction",
        number="H17",
        statement="Two layers of attention learn, all at once, to copy what followed a token; one cannot.",
        source="Olsson et al. 2022; Elhage et al. 2021",
        expectation=(
            "Induction: attention-only, vocab 64, random prefix of RANDOM period 8–28 repeated, d=64, "
            "4 heads, 2–4k steps: 2 layers show an abrupt drop, prefix-match >.5, second-copy loss →~0; "
            "1 layer stays high. A FIXED period lets 1 layer cheat by position."
        ),
        experiment="induction",
    ),
    Claim(
        name="serving",
        number="H18",
        statement="A cache, blocks, chunks and fused attention change no answer, only time and memory.",
        source="Pope et al. 2022; Kwon et al. 2023; Agrawal et al. 2023; Dao et al. 2022",
        expectation=(
            "Serving: cache/paged/chunked/flash equal full pass; time per token flat vs linear; memory "
            "curves."
        ),
        experiment="serving",
    ),
    Claim(
        name="shared-keys",
        number="H19",
        statement="Heads can share keys and values, or make them from a latent, at little cost in loss.",
        source="Shazeer 2019; Ainslie et al. 2023; DeepSeek-AI 2024, section 2.1",
        expectation=(
            "MHA/GQA/MQA/MLA: equal steps: small loss spread, cache 1, n_kv/n_h, 1/n_h, D24b; report bytes."
        ),
        experiment="shared_keys",
    ),
    Claim(
        name="balanced-experts",
        number="H20",
        statement=(
            "Experts that nothing keeps in balance fall out of use; with balance they beat a dense layer of "
            "equal work."
        ),
        source="Fedus et al. 2021, sections 2.2 and 3; Jiang et al. 2024; DeepSeek-AI 2024, section 2.1.2",
        expectation=(
            "MoE: 8 experts top-1/2, ± aux, ± bias: no balancing → entropy collapse (loss→N), with → 1.0; "
            "equal active FLOPs gives lower loss than dense."
        ),
        experiment="balanced_experts",
    ),
    Claim(
        name="norm-and-activation",
        number="H21",
        statement="At equal parameters, the kind of norm and of activation changes little.",
        source="Zhang and Sennrich 2019; Shazeer 2020; Narang et al. 2021",
        expectation=(
            "LN vs RMS, ReLU/GELU/SwiGLU at equal parameters: 0–2 % differences; report noise honestly."
        ),
        experiment="norm_and_activation",
    ),
    Claim(
        name="planted-causes",
        number="H22",
        statement=(
            "Attention weights tell less and less, the deeper the layer, of which tokens an answer leans on."
        ),
        source=(
            "Abnar and Zuidema 2020, section 4; Jain and Wallace 2019, section 4.2; Sundararajan et al. 2017"
        ),
        expectation=(
            "Explanation: planted-cause task; Spearman of raw attention, rollout, IG vs occlusion by layer: "
            "raw falls with depth; adversarial attention keeps the output."
        ),
        experiment="planted_causes",
    ),
    Claim(
        name="stored-facts",
        number="H23",
        statement="Facts are kept in feed-forwards, and one of them can be rewritten there alone.",
        source="Geva et al. 2021; Meng et al. 2022, sections 2 and 3",
        expectation=(
            "FFN memory: 200 synthetic facts; knock out FFN vs attention; ROME edit: "
            "efficacy/paraphrase/specificity."
        ),
        experiment="stored_facts",
    ),
    Claim(
        name="retrieval-by-depth",
        number="H24",
        statement="In a long context a thing is found less surely the longer it is, and depending on where.",
        source="Liu et al. 2023",
        expectation="Long context: key–value retrieval accuracy by depth and length; attention dilution.",
        experiment="retrieval_by_depth",
    ),
    Claim(
        name="cost-crossover",
        number="H25",
        statement="Scores cost more than the feed-forward from n = 4d on, attention in all from n = 2d on.",
        source="Vaswani et al. 2017, table 1; Kaplan et al. 2020, table 1",
        expectation=(
            "Cost: time scores vs FFN vs n at d=128: crossover near n=4d (512), total near 2d (hardware "
            "shifts it); FLOP counter exact."
        ),
        experiment="cost_crossover",
    ),
    Claim(
        name="capacity",
        number="H26",
        statement="Weights, cache and training state take the bytes that counting their numbers gives.",
        source="Kwon et al. 2023; Rajbhandari et al. 2020, section 3.1; Touvron et al. 2023",
        expectation="Capacity: formula vs summed tensor bytes, <1 % apart.",
        experiment="capacity",
    ),
    Claim(
        name="smaller-cache",
        number="H27",
        statement="Of a cache the latest keys are not enough: the first, or the most attended, must stay.",
        source="Xiao et al. 2023; Zhang et al. 2023",
        expectation=(
            "Streaming/compression: window vs sinks+window vs H2O at equal budget; tiny models may not form "
            "sinks, report either way."
        ),
        experiment="smaller_cache",
    ),
    Claim(
        name="one-head",
        number="H28",
        statement="At equal parameters, several heads are better than one, and too many are worse again.",
        source="Vaswani et al. 2017, table 3 (A)",
        expectation=(
            "Heads: 1, 8 and 32 at equal width and parameters: eight have the lowest loss; that of one is "
            "above it in every seed, by less than 10 % (base Transformer: 24.9, 25.8 and 25.4 BLEU)."
        ),
        experiment="one_head",
    ),
    Claim(
        name="no-residual",
        number="H29",
        statement="Without residuals the states of all tokens become one, and depth cannot be trained.",
        source="Dong et al. 2021; He et al. 2016",
        expectation=(
            "No residual, 6 layers d=64: at first weights the part of the states that differs between "
            "tokens falls with depth: under a tenth for attention alone, a feed-forward slows it, residuals "
            "keep over a half; trained alike, the loss comes less than half of the way from unigram entropy "
            "to that with residuals."
        ),
        experiment="no_residual",
    ),
    Claim(
        name="no-feed-forward",
        number="H30",
        statement="A model without feed-forwards is worse chiefly because it is smaller.",
        source="Geva et al. 2021; Sukhbaatar et al. 2019; Elhage et al. 2021",
        expectation=(
            "No feed-forward: at equal depth the loss is higher in every seed; at equal parameters (6 layers "
            "of attention for 2 whole ones) less than half of that difference is left; attention alone still "
            "learns: under three quarters of unigram entropy."
        ),
        experiment="no_feed_forward",
    ),
    Claim(
        name="attention-distance",
        number="H31",
        statement="Deeper layers look farther back.",
        source="Vig and Belinkov 2019",
        expectation=(
            "Attention distance, first token left out: the mean of the last third of the layers is above "
            "that of the first third, in a small trained model and in SmolLM2-135M; heads of one layer "
            "differ: in over half of the layers the farthest looks over twice as far as the nearest."
        ),
        experiment="attention_distance",
    ),
    Claim(
        name="translation-chinese",
        number="H32",
        statement="Translation by attention beats one fixed vector, and most on long sentences.",
        source="Bahdanau et al. 2014, figure 2; Luong et al. 2015; Gehring et al. 2017; Vaswani et al. 2017",
        expectation=(
            "English to Chinese characters (Tatoeba), equal batches: all with attention above RNNencdec in "
            "BLEU and chrF; Bahdanau's lead over it larger on the longest sentences than on the shortest, "
            "and RNNencdec keeps less of its BLEU there; Luong (global, general) within 3 BLEU of Bahdanau; "
            "ConvS2S and the Transformer not below Bahdanau; three seeds give the same order."
        ),
        experiment="translation_chinese",
        seeds=1,
    ),
    Claim(
        name="translation-spanish",
        number="H33",
        statement="The same on verses of the Bible, three times as long.",
        source="Bahdanau et al. 2014, figure 2; Luong et al. 2015",
        expectation=(
            "English to Spanish (Bible verses of up to 30 words), equal batches: Bahdanau and Luong (global, "
            "general) above RNNencdec in BLEU and chrF; Bahdanau's lead over it larger on the longest verses "
            "than on the shortest, and RNNencdec keeps less of its BLEU there; Luong within 3 BLEU of "
            "Bahdanau; three seeds give the same order."
        ),
        experiment="translation_spanish",
        seeds=1,
    ),
    Claim(
        name="luong-chinese",
        number="H34",
        statement="How a score is made matters, and so does where attention looks.",
        source="Luong et al. 2015, table 4",
        expectation=(
            "Luong's six, English to Chinese: dot and general above location, neither below concat; local-p "
            "not below global attention with the same score; local-m below local-p, and by more on the "
            "longest sentences than on the shortest, as the languages differ in order; three seeds give the "
            "same order."
        ),
        experiment="luong_chinese",
        seeds=1,
    ),
    Claim(
        name="luong-spanish",
        number="H35",
        statement="Between languages of like word order, looking straight ahead does nearly as well.",
        source="Luong et al. 2015, table 4",
        expectation=(
            "Luong's six, English to Spanish: dot and general above location, neither below concat; local-p "
            "not below global attention with the same score; local-m within 2 BLEU of local-p, as the "
            "languages order words much alike; three seeds give the same order."
        ),
        experiment="luong_spanish",
        seeds=1,
    ),
    Claim(
        name="parallel-spanish",
        number="H36",
        statement="Translations are better without recurrence: by convolutions, and by attention alone.",
        source="Gehring et al. 2017, table 1; Vaswani et al. 2017, table 2",
        expectation=(
            "English to Spanish, equal batches: ConvS2S above Luong (global, general), the Transformer above "
            "ConvS2S, in BLEU and in chrF; three seeds give the same order."
        ),
        experiment="parallel_spanish",
        seeds=1,
    ),
)

CLAIMS: Mapping[str, Claim] = {claim.name: claim for claim in _CLAIMS}


def chosen(names: Sequence[str]) -> list[Claim]:
    """Claims by name or number, each once; "all" is all. Raises RequestError for what there is not."""
    found: dict[str, Claim] = {}
    for name in names:
        same = [claim for claim in _CLAIMS if name.lower() in ("all", claim.name, claim.number.lower())]
        if not same:
            near = get_close_matches(name.lower(), CLAIMS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(CLAIMS)}."
            raise RequestError(f"There is no claim {name!r}; {hint}")
        found |= {claim.name: claim for claim in same}
    return list(found.values())
