// Keys and values in blocks of the cache, and attention over them.
#include <algorithm>
#include <functional>
#include <memory>

#include "matrices.h"

namespace qkv::tests {

namespace {

constexpr Kept KEPT[] = {Kept::F32, Kept::BF16, Kept::I8};

BlockShape shape_of(Kept kept, int key_dim, int value_dim) {
  return {kept, round_up(key_dim, 4), round_up(value_dim, LANES)};
}

float float_at(const u8* at) {
  float x;
  std::memcpy(&x, at, 4);
  return x;
}

double key_in(const BlockShape& s, const u8* block, int token, int d) {
  if (s.kept == Kept::F32) return float_at(block + (d * 16 + token) * 4);
  if (s.kept == Kept::BF16) return from_bf16(half_at(block + ((d / 2 * 16 + token) * 2 + d % 2) * 2));
  const double scale = float_at(block + s.key_dim * 16 + token * 4);
  return scale * (block[(d / 4 * 16 + token) * 4 + d % 4] - 128);
}

// A block whose values follow its keys.
Block whole(const BlockShape& s, std::vector<u8>& bytes) { return {bytes.data(), bytes.data() + s.key_bytes()}; }

double value_in(const BlockShape& s, const u8* block, int token, int d) {
  const u8* values = block + s.key_bytes();
  if (s.kept == Kept::F32) return float_at(values + (token * s.value_dim + d) * 4);
  if (s.kept == Kept::BF16) return from_bf16(half_at(values + ((token / 2 * s.value_dim + d) * 2 + token % 2) * 2));
  const double scale = float_at(values + s.value_dim * 16 + token * 4);
  return scale * static_cast<i8>(values[token * s.value_dim + d]);
}

double query_in(const Kernels& kernels, const BlockShape& s, const Queries& q, int place, int d) {
  if (s.kept == Kept::F32) return float_at(q.packed + (d * q.count + place) * 4);
  if (s.kept == Kept::BF16 && kernels.pairs == Reading::Rows && s.key_dim % GROUP == 0)
    return from_bf16(half_at(q.packed + (place * s.key_dim + d) * 2));
  if (s.kept == Kept::BF16) return from_bf16(half_at(q.packed + ((d / 2 * q.count + place) * 2 + d % 2) * 2));
  return q.scale[place] * static_cast<double>(static_cast<i8>(q.packed[(d / 4 * q.count + place) * 4 + d % 4]));
}

// How far a number may be from what is kept of it.
double precision(Kept kept, double x, double most) {
  return kept == Kept::F32 ? 0 : kept == Kept::BF16 ? std::fabs(x) * 0x1p-8 : most / 127 * 0.50001;
}

double most_of(const std::vector<float>& x) {
  double most = 0;
  for (float each : x) most = std::max<double>(most, std::fabs(each));
  return most;
}

// Tokens in blocks, under queries that see different parts of them.
struct Scene {
  const Kernels& kernels;
  BlockShape shape;
  int key_dim, value_dim, tokens;
  std::vector<std::vector<u8>> blocks;
  std::vector<Block> places;
  std::unique_ptr<Queries> q = std::make_unique<Queries>();
  std::vector<std::vector<float>> queries;
  std::vector<float> bias;

  Scene(const Kernels& kernels, Kept kept, int key_dim, int value_dim, int tokens, Numbers& numbers)
      : kernels(kernels), shape(shape_of(kept, key_dim, value_dim)), key_dim(key_dim), value_dim(value_dim), tokens(tokens),
        blocks(round_up(tokens, SPLIT) / 16, std::vector<u8>(shape.bytes())) {
    for (int t = 0; t < tokens; t++)
      kernels.keep(shape, numbers.vector(key_dim, 2).data(), key_dim, numbers.vector(value_dim).data(), value_dim,
                   whole(shape, blocks[t / 16]), t % 16);
    for (auto& block : blocks) places.push_back(whole(shape, block));
  }

  // `count` queries; the i-th sees from 3 i on, up to and with its position.
  void ask(const Kernels& kernels, int count, Numbers& numbers) {
    q->count = count, queries.clear();
    for (int i = 0; i < count; i++) {
      q->position[i] = std::max(0, tokens - 1 - 5 * i);
      q->from[i] = std::min(3 * i, q->position[i]), q->to[i] = q->position[i] + 1;
      q->slope[i] = 0, q->bias[i] = nullptr;
      queries.push_back(numbers.vector(key_dim, 2));
      kernels.pack(shape, *q, i, queries[i].data(), key_dim, 0.3f);
    }
  }

  // One of them by itself.
  std::unique_ptr<Queries> alone(int i) const {
    auto one = std::make_unique<Queries>();
    one->count = 1, one->cap = q->cap, one->reach = q->reach;
    one->position[0] = q->position[i], one->from[0] = q->from[i], one->to[0] = q->to[i];
    one->slope[0] = q->slope[i], one->bias[0] = q->bias[i];
    kernels.pack(shape, *one, 0, queries[i].data(), key_dim, 0.3f);
    return one;
  }
};

struct Found {
  double top = -INFINITE, total = 0;
  std::vector<double> mixed, sizes;
};

double score(const Scene& s, int place, int token) {
  const Queries& q = *s.q;
  double x = 0;
  for (int d = 0; d < s.shape.key_dim; d++) x += query_in(s.kernels, s.shape, q, place, d) * key_in(s.shape, s.places[token / 16].key, token % 16, d);
  if (q.cap != 0) x = q.cap * std::tanh(x / q.cap);
  const int ahead = token - q.position[place];
  x -= q.slope[place] * std::abs(ahead);
  if (q.bias[place] != nullptr) x += q.bias[place][std::clamp(ahead, -q.reach, q.reach) + q.reach];
  return x;
}

Found softmax(const Scene& s, int place, int first, int end) {
  Found found;
  found.mixed.resize(s.shape.value_dim), found.sizes.resize(s.shape.value_dim);
  const int from = std::max(first, s.q->from[place]), to = std::min(end, s.q->to[place]);
  for (int t = from; t < to; t++) found.top = std::max(found.top, score(s, place, t));
  for (int t = from; t < to; t++) {
    const double p = std::exp(score(s, place, t) - found.top);
    found.total += p;
    for (int d = 0; d < s.shape.value_dim; d++) {
      const double v = value_in(s.shape, s.places[t / 16].key, t % 16, d);
      found.mixed[d] += p * v, found.sizes[d] += p * std::fabs(v);
    }
  }
  return found;
}

struct Answer {
  std::vector<float> top, total, mixed;
  Answer(int count, int value_dim) : top(count), total(count), mixed(count * value_dim, NO_NUMBER) {}
  Partial partial() { return {top.data(), total.data(), mixed.data()}; }
};

// The scores' own rounding is what e^x multiplies: sums of key_dim products of up to 4 * 0.3, in float.
double relative(const Scene& s) { return (4.0 * s.shape.key_dim + 200) * UNIT * 4; }

void compare(Record& record, const Scene& s, Answer& answer, int first, int end) {
  for (int i = 0; i < s.q->count; i++) {
    const auto want = softmax(s, i, first, end);
    record.near(answer.total[i], want.total, want.total * relative(s), "total: from, query", {first, i});
    if (want.total == 0) continue;  // what is mixed of nothing is nobody's
    record.near(answer.top[i], want.top, (1 + std::fabs(want.top)) * relative(s), "top: from, query", {first, i});
    // weights of values in bf16 are rounded to it
    const double allowed = relative(s) + (s.shape.kept == Kept::BF16 ? 0x1p-8 : 0);
    for (int d = 0; d < s.shape.value_dim; d++)
      record.near(answer.mixed[i * s.shape.value_dim + d], want.mixed[d], want.sizes[d] * allowed,
                  "mixed: from, query, column", {first, i, d});
  }
}

// Whoever else is asked, a query's answer is the same to the bit.
void compare_alone(Record& record, const Scene& s, const Answer& answer, const std::vector<Block>& blocks, int first) {
  const auto all = [](float top, float total, const float* mixed, int n) {
    std::vector<float> found{top, total};
    found.insert(found.end(), mixed, mixed + n);
    return found;
  };
  const int n = s.shape.value_dim;
  for (int i = 0; i < s.q->count; i++) {
    Answer one(1, n);
    s.kernels.attend(s.shape, *s.alone(i), blocks.data(), nullptr, first, one.partial());
    if (one.total[0] == 0 && answer.total[i] == 0) continue;  // what is mixed of nothing is nobody's
    record.same(all(answer.top[i], answer.total[i], answer.mixed.data() + i * n, n), all(one.top[0], one.total[0], one.mixed.data(), n),
                "not the same as alone: from, query", {first, i});
  }
}

// Attention over each split, and over all of them merged. Told with it: kept, dimensions of keys and
// values, tokens, queries.
void attend_all(const Kernels& kernels, Record& record, const Scene& s, const std::string& what) {
  const int value_dim = s.shape.value_dim, count = s.q->count, splits = static_cast<int>(s.places.size()) / SPLIT_BLOCKS;
  Answer merged(count, value_dim);
  std::string about = what;
  for (const int each : {static_cast<int>(s.shape.kept), s.key_dim, s.value_dim, s.tokens, count}) about.append(" ").append(std::to_string(each));
  record.about(about);
  for (int split = 0; split < splits; split++) {
    std::vector<Block> blocks(s.places.begin() + split * SPLIT_BLOCKS, s.places.begin() + (split + 1) * SPLIT_BLOCKS);
    for (int b = 0; b < SPLIT_BLOCKS; b++) {  // blocks that none of them sees are not given
      const int start = split * SPLIT + b * 16;
      bool any = false;
      for (int i = 0; i < count; i++) any |= s.q->from[i] < start + 16 && s.q->to[i] > start;
      if (!any) blocks[b] = {};
    }
    Answer answer(count, value_dim);
    const Block* next = split + 1 < splits ? s.places.data() + (split + 1) * SPLIT_BLOCKS : nullptr;
    kernels.attend(s.shape, *s.q, blocks.data(), next, split * SPLIT, answer.partial());
    compare(record, s, answer, split * SPLIT, (split + 1) * SPLIT);
    compare_alone(record, s, answer, blocks, split * SPLIT);
    kernels.merge(merged.partial(), answer.partial(), count, value_dim);
  }
  record.about(about + ", merged");
  compare(record, s, merged, 0, s.tokens);
}

void scores_changed(const Kernels& kernels, Record& record, Scene& s, Numbers& numbers) {
  Queries& q = *s.q;
  attend_all(kernels, record, s, "attend");
  q.cap = 0.8f;
  attend_all(kernels, record, s, "with a cap");
  for (int i = 0; i < q.count; i++) q.slope[i] = 0.05f * static_cast<float>(i + 1);
  attend_all(kernels, record, s, "with a cap and slopes");
  q.cap = 0, q.reach = 6, s.bias = numbers.vector(q.count * 13);
  for (int i = 0; i < q.count; i++) q.bias[i] = s.bias.data() + i * 13, q.slope[i] = 0;
  attend_all(kernels, record, s, "with a table of biases");
  for (int i = 0; i < q.count; i++) q.to[i] = std::min(s.tokens, q.to[i] + 7);
  attend_all(kernels, record, s, "with keys ahead");
  q.from[0] = q.to[0];
  attend_all(kernels, record, s, "one that sees nothing");
}

// A query, and a token that is in the same block as those before and after it.
void ask_with(const Kernels& kernels, Scene& s, int token, const std::vector<float>& key, const std::vector<float>& value,
              const std::vector<float>& query, Answer& answer) {
  kernels.keep(s.shape, key.data(), s.key_dim, value.data(), s.value_dim, whole(s.shape, s.blocks[token / 16]), token % 16);
  kernels.pack(s.shape, *s.q, 0, query.data(), s.key_dim, 0.3f);
  kernels.attend(s.shape, *s.q, s.places.data(), nullptr, 0, answer.partial());
}

// One of key, value and query is no number: neither is what comes out, where it is seen. `alone`: nothing
// else is, in a split whose other blocks someone else sees.
void unsound(const Kernels& kernels, Record& record, Kept kept, int bad, bool alone, Numbers& numbers) {
  for (int which = 0; which < 3; which++)
    for (int token : {0, 9, 20, 29}) {
      Scene s(kernels, kept, 40, 40, 60, numbers);
      s.ask(kernels, 1, numbers);
      std::vector<float> rows[3] = {numbers.vector(40), numbers.vector(40), numbers.vector(40)};
      rows[which][bad] = NO_NUMBER;
      s.q->from[0] = alone ? token : 0, s.q->to[0] = token + 1;
      Answer answer(1, s.shape.value_dim);
      ask_with(kernels, s, token, rows[0], rows[1], rows[2], answer);
      for (int d = 0; d < 40; d++) {
        if (which == 1 && kept != Kept::I8 && d != bad) continue;  // a column of its own
        record.that(std::isnan(answer.mixed[d] / answer.total[0]) && answer.total[0] != 0,
                    "a number from key, value or query that is none: kept, which, at, token, column",
                    {static_cast<int>(kept), which, bad, token, d});
      }
    }
}

// A key that is no number changes nothing where it is not seen.
void hidden(const Kernels& kernels, Record& record, Kept kept, Numbers& numbers) {
  for (int token : {12, 22}) {
    Scene s(kernels, kept, 40, 40, 60, numbers);
    s.ask(kernels, 1, numbers);
    s.q->from[0] = 13, s.q->to[0] = 22;
    const auto query = numbers.vector(40), value = numbers.vector(40);
    Answer answers[2] = {{1, s.shape.value_dim}, {1, s.shape.value_dim}};
    ask_with(kernels, s, token, numbers.vector(40), value, query, answers[0]);
    ask_with(kernels, s, token, std::vector<float>(40, NO_NUMBER), value, query, answers[1]);
    record.same(answers[1].mixed, answers[0].mixed, "a hidden key is seen: token", {token});
    record.that(std::isfinite(answers[1].total[0]), "a hidden key counts: token", {token});
  }
}

// A kept row's numbers against those given.
void kept_row(Record& record, Kept kept, const std::vector<float>& x, double by, int dim,
              const char* name, const std::function<double(int)>& got) {
  for (int d = 0; d < dim; d++) {
    const double want = d < static_cast<int>(x.size()) ? x[d] * by : 0;
    record.near(got(d), want, precision(kept, want, most_of(x) * by) + 2 * UNIT * std::fabs(want),
                name, {static_cast<int>(kept), d});
  }
}

}  // namespace

void check_cache(const Kernels& kernels, Record& record) {
  Numbers numbers(8);
  for (const Kept kept : KEPT)
    for (int key_dim : {6, 64})
      for (int value_dim : {16, 40}) {
        const auto s = shape_of(kept, key_dim, value_dim);
        std::vector<u8> block(s.bytes());
        std::vector<std::vector<float>> keys, values, queries;
        for (int t = 0; t < 16; t++) {
          keys.push_back(numbers.vector(key_dim, 3)), values.push_back(numbers.vector(value_dim, 3));
          if (t == 5) std::fill(keys[t].begin(), keys[t].end(), 0.0f);
          kernels.keep(s, keys[t].data(), key_dim, values[t].data(), value_dim, whole(s, block), t);
        }
        for (int t = 0; t < 16; t++) {  // once all are there: none has disturbed another
          kept_row(record, kept, keys[t], 1, s.key_dim, "key: kept, dimension", [&](int d) { return key_in(s, block.data(), t, d); });
          kept_row(record, kept, values[t], 1, s.value_dim, "value: kept, dimension", [&](int d) { return value_in(s, block.data(), t, d); });
        }
        auto q = std::make_unique<Queries>();
        q->count = kernels.queries(s);
        for (int i = 0; i < q->count; i++) {
          queries.push_back(numbers.vector(key_dim, 3));
          kernels.pack(s, *q, i, queries[i].data(), key_dim, 0.3f);
        }
        for (int i = 0; i < q->count; i++) {
          kept_row(record, kept, queries[i], 0.3f, s.key_dim, "query: kept, dimension", [&](int d) { return query_in(kernels, s, *q, i, d); });
          int sum = 0;
          for (int d = 0; d < s.key_dim; d++) sum += static_cast<i8>(q->packed[(d / 4 * q->count + i) * 4 + d % 4]);
          if (kept == Kept::I8) record.near(q->sum[i], sum, 0, "sum of a query's bytes");
        }
      }
}

void check_attend(const Kernels& kernels, Record& record) {
  Numbers numbers(10);
  for (const Kept kept : KEPT) {
    for (int count = 1; count <= kernels.queries(shape_of(kept, 64, 80)); count++)
      for (int tokens : {1, 18, 150}) {
        Scene s(kernels, kept, 64, 80, tokens, numbers);
        s.ask(kernels, count, numbers);
        scores_changed(kernels, record, s, numbers);
      }
    for (const auto& [key_dim, value_dim] : {std::pair{6, 16}, {128, 144}, {20, 40}}) {
      Scene s(kernels, kept, key_dim, value_dim, 40, numbers);
      s.ask(kernels, kernels.queries(s.shape), numbers);
      attend_all(kernels, record, s, "attend");
    }
    record.about("attend");
    for (int bad : {0, 3, 9, 17, 37})
      for (const bool alone : {false, true}) unsound(kernels, record, kept, bad, alone, numbers);
    hidden(kernels, record, kept, numbers);
  }
}

}  // namespace qkv::tests
