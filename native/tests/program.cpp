// A small decoder as a program: the same bits for each number of threads, each cutting into chunks and
// all company in a batch.
#include "program.h"

#include "matrices.h"

namespace qkv::tests {

namespace {

constexpr int WIDTH = 64, HEADS = 4, KV_HEADS = 2, HEAD = 32, HIDDEN = 96, WORDS = 90, LAYERS = 3;
constexpr int TOKENS = 150, BLOCKS = 10;  // of each sequence: more than one split

std::shared_ptr<const Matrix> matrix(Format format, int rows, int columns, Numbers& numbers) {
  const auto from = given(format, rows, columns, numbers);
  Arena arena;
  return std::make_shared<const Matrix>(arena, format, columns, std::vector<Part>{{from.data.data(), rows}}, false);
}

std::shared_ptr<const Matrix> gate(Format format, int rows, int columns, Numbers& numbers) {
  const auto from = given(format, 2 * rows, columns, numbers);
  Arena arena;
  return std::make_shared<const Matrix>(
      arena, format, columns, std::vector<Part>{{from.data.data(), rows}, {from.data.data() + from.data.size() / 2, rows}}, true);
}

void linear(const Kernels& kernels, Program& program, Span x, Span out, std::shared_ptr<const Matrix> matrix, Finish finish) {
  program.add(std::make_unique<Read>(x, kernels.reading(matrix->kind()), matrix->padded()));
  program.add(std::make_unique<Linear>(out, std::vector<Weights>{{matrix, 0, {}}}, finish));
}

// Buffers: 0 the rows, 1 normalised, 2 query, key and value, 3 mixed, 4 hidden, 5 the wanted rows, 6 logits, 7 far
// queries, 8 and 9 the wanted ones of 2 and 7. What is not wanted is left once the last layer has stored.
// The layers see all before them, a window, and first keys beside a window.
std::unique_ptr<Program> decoder(const Kernels& kernels, Format format) {
  Numbers numbers(11);
  const int qkv = (HEADS + 2 * KV_HEADS) * HEAD;
  auto program = std::make_unique<Program>(std::vector<int>{WIDTH, WIDTH, qkv, HEADS * HEAD, HIDDEN, WIDTH, WORDS, HEADS * HEAD, HEADS * HEAD, HEADS * HEAD}, 6);
  const Span wanted{5, 0, WIDTH}, wanted_query{8, 0, HEADS * HEAD}, wanted_far{9, 0, HEADS * HEAD};
  Span x{0, 0, WIDTH};
  const Span h{1, 0, WIDTH}, mixed{3, 0, HEADS * HEAD}, hidden{4, 0, HIDDEN};
  Span query{2, 0, HEADS * HEAD}, far{7, 0, HEADS * HEAD};
  const Span key{2, HEADS * HEAD, KV_HEADS * HEAD}, value{2, (HEADS + KV_HEADS) * HEAD, KV_HEADS * HEAD};
  const auto table = matrix(format, WORDS, WIDTH, numbers);
  program->add(std::make_unique<TakeRows>(x, table, TakeRows::Token, 1.0f, 0, false));
  constexpr int FIRST = 5, WINDOW = 30;
  program->add(std::make_unique<Angles>(0, std::vector<float>(HEAD / 2, 0.1f), 1.0f, INT32_MAX));
  program->add(std::make_unique<Angles>(1, std::vector<float>(HEAD / 2, 0.1f), 1.0f, FIRST + WINDOW - 1));
  Finish add, gated;
  add.add = true, gated.gated = true, gated.activation.kind = Activation::Silu;
  for (int layer = 0; layer < LAYERS; layer++) {
    program->add(std::make_unique<Norm>(h, x, false, 1e-5f, std::vector<float>(), std::vector<float>(), 1));
    linear(kernels, *program, h, {2, 0, qkv}, matrix(format, qkv, WIDTH, numbers), {});
    if (layer == 2) program->add(std::make_unique<Rotate>(far, query, HEADS, 1, HEAD / 2, false));
    program->add(std::make_unique<Rotate>(query, query, HEADS, 0, HEAD / 2, false));
    program->add(std::make_unique<Rotate>(key, key, KV_HEADS, 0, HEAD / 2, false));
    program->add(std::make_unique<Store>(layer, key, value));
    if (layer + 1 == LAYERS) {
      program->pick({{wanted, x}, {wanted_query, query}, {wanted_far, far}});
      x = wanted, query = wanted_query, far = wanted_far;
    }
    Attention attention{mixed, query, far, layer, HEADS, KV_HEADS, 0.2f};
    attention.after = 0;
    if (layer == 1) attention.before = 40;
    if (layer == 2) attention.before = WINDOW, attention.first = FIRST;
    auto attend = std::make_unique<Attend>(attention);
    auto end = std::make_unique<AttendEnd>(*attend);
    program->add(std::move(attend));
    program->add(std::move(end));
    linear(kernels, *program, mixed, x, matrix(format, WIDTH, HEADS * HEAD, numbers), add);
    program->add(std::make_unique<Norm>(h, x, true, 1e-5f, std::vector<float>(), std::vector<float>(), 1));
    linear(kernels, *program, h, hidden, gate(format, HIDDEN, WIDTH, numbers), gated);
    linear(kernels, *program, hidden, x, matrix(format, WIDTH, HIDDEN, numbers), add);
  }
  linear(kernels, *program, x, {6, 0, WORDS}, table, {});
  return program;
}

// What the program says after each token of `sequences` equally long ones, `chunk` tokens in a step; or
// after every so many-th, and 0 for the others.
std::vector<float> answers(const Kernels& kernels, Format format, Kept kept, int threads, int chunk, int sequences, int every = 1) {
  const auto program = decoder(kernels, format);
  Cache cache(std::vector<Slot>(LAYERS, {0, KV_HEADS, HEAD, HEAD}), 1, kept);
  cache.reserve(0, BLOCKS * sequences);
  Workers workers(threads);
  std::vector<i32> blocks;
  for (int s = 0; s < sequences; s++)  // in an order of no meaning
    for (int b = 0; b < BLOCKS; b++) blocks.push_back((b * 7 + 3) % BLOCKS * sequences + s);
  std::vector<float> found(std::size_t(sequences) * TOKENS * WORDS), step;
  for (int start = 0; start < TOKENS; start += chunk) {
    const int end = std::min(TOKENS, start + chunk), count = (end - start) * sequences;
    std::vector<i32> tokens, of, positions, wanted;
    for (int s = 0; s < sequences; s++)
      for (int t = start; t < end; t++) {
        if (t % every == 0) wanted.push_back(static_cast<i32>(tokens.size()));
        tokens.push_back((t * 31 + s * 17) % WORDS), of.push_back(s), positions.push_back(t);
      }
    const std::vector<i32> lengths(sequences, end);
    const int answered = static_cast<int>(wanted.size());
    step.resize(std::size_t(answered) * WORDS);
    program->run({count, tokens.data(), of.data(), positions.data(), nullptr, answered, wanted.data()},
                 {{blocks.data(), BLOCKS, lengths.data()}}, cache, workers, kernels, step.data());
    for (int i = 0; i < answered; i++)
      std::copy_n(step.begin() + i * WORDS, WORDS,
                  found.begin() + (std::size_t(of[wanted[i]]) * TOKENS + positions[wanted[i]]) * WORDS);
  }
  return found;
}

void one_kind(const Kernels& kernels, Record& record, Format format, Kept kept) {
  const auto want = answers(kernels, format, kept, 1, 1, 1);
  std::string about(layout(format).name);
  record.about(about.append(", kept ").append(std::to_string(static_cast<int>(kept))));
  int different = 0;
  for (int t = 1; t < TOKENS; t++) different += want[t * WORDS] != want[(t - 1) * WORDS];
  bool finite = true;
  for (float each : want) finite &= std::isfinite(each);
  record.that(finite && different > TOKENS / 2, "answers that say nothing");
  for (int threads = 1; threads <= 4; threads++)
    for (int chunk : {1, 7, 64, TOKENS}) {
      if (threads > 1 && chunk == 1) continue;  // as many steps as tokens; one thread has shown it
      record.same(answers(kernels, format, kept, threads, chunk, 1), want,
                  "not the same bits: threads, chunk", {threads, chunk});
    }
  record.same(answers(kernels, format, kept, 2, 1, 1), want, "not the same bits one by one on two threads");
  auto first = answers(kernels, format, kept, 3, 11, 3);
  first.resize(want.size());
  record.same(first, want, "not the same bits in company");
  auto some = want;
  for (int t = 0; t < TOKENS; t++)
    if (t % 3 != 0) std::fill_n(some.begin() + t * WORDS, WORDS, 0.0f);
  for (int chunk : {7, TOKENS})
    record.same(answers(kernels, format, kept, 1, chunk, 1, 3), some, "not the same bits where few are wanted: chunk", {chunk});
}

}  // namespace

void check_program(const Kernels& kernels, Record& record) {
  one_kind(kernels, record, Format::F32, Kept::F32);
  one_kind(kernels, record, Format::BF16, Kept::BF16);
  one_kind(kernels, record, Format::Q4_1, Kept::BF16);
  one_kind(kernels, record, Format::Q8_0, Kept::I8);
}

}  // namespace qkv::tests
