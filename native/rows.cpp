#include "rows.h"

#include <cmath>
#include <numeric>

namespace qkv {

void TakeRows::run(Step& step, int row) {
  const i32* given = by == Token ? step.rows.tokens : by == Position ? step.rows.positions : step.rows.types;
  float* to = step.at(out, row);
  thread_local std::vector<float> values;
  values.resize(out.width);
  table->row((given == nullptr ? 0 : given[row]) + offset, values.data());
  if (add) {
    step.kernels.add(to, 1, values.data(), scale, out.width);
  } else {
    std::copy(values.begin(), values.end(), to);
    if (scale != 1) step.kernels.scale(to, scale, out.width);
  }
}

void Sinusoids::run(Step& step, int row) {
  float* to = step.at(out, row);
  const int pairs = out.width / 2;
  for (int i = 0; i < pairs; i++) {
    const double angle = step.rows.positions[row] * std::pow(base, -2.0 * i / out.width);
    to[halves ? i : 2 * i] += static_cast<float>(std::sin(angle));
    to[halves ? pairs + i : 2 * i + 1] += static_cast<float>(std::cos(angle));
  }
}

void Angles::reserve(Step& step, int rows) {
  if (static_cast<int>(step.angles.size()) <= set) step.angles.resize(set + 1);
  step.angles[set].reserve(std::size_t(rows) * frequencies.size() * 2 * sizeof(float));
}

void Angles::run(Step& step, int row) {
  const std::size_t pairs = frequencies.size();
  float* cosine = step.angles[set].as<float>() + row * pairs * 2;
  const float position = static_cast<float>(std::min(step.rows.positions[row], most));
  for (std::size_t i = 0; i < pairs; i++) {
    const float angle = position * frequencies[i];
    cosine[i] = factor * std::cos(angle);
    cosine[pairs + i] = factor * std::sin(angle);
  }
}

void Rotate::run(Step& step, int row) {
  const float* cosine = step.angles[set].as<float>() + std::size_t(row) * pairs * 2;
  const int wide = out.width / heads;
  const float* from = step.at(x, row);
  if (from != step.at(out, row)) std::copy(from, from + out.width, step.at(out, row));
  for (int head = 0; head < heads; head++)
    step.kernels.rotate(step.at(out, row) + head * wide, pairs, interleaved, cosine, cosine + pairs);
}

void Pick::run(Step& step, int row) {
  const float* from = step.at(x, step.rows.wanted_rows[row]);
  std::copy(from, from + x.width, step.at(out, row));
}

void Norm::run(Step& step, int row) {
  const int n = x.width / groups;
  const auto part = [&](const std::vector<float>& all, int group) {
    return all.empty() ? nullptr : all.data() + (static_cast<int>(all.size()) > n ? group * n : 0);
  };
  for (int g = 0; g < groups; g++)
    step.kernels.norm(step.at(x, row) + g * n, n, centred, eps, part(scale, g), part(bias, g), step.at(out, row) + g * n);
}

void Clamp::run(Step& step, int row) { step.kernels.clamp(step.at(out, row), bound, out.width); }

void Store::run(Step& step, int row) {
  const auto& size = step.cache.slot(slot);
  const int position = step.rows.positions[row];
  const int block = step.tables[size.group].of(step.rows.sequences[row])[position / BLOCK_TOKENS];
  for (int head = 0; head < size.kv_heads; head++)
    step.kernels.keep(step.cache.shape(slot), step.at(key, row) + head * size.key_dim, size.key_dim,
                      step.at(value, row) + head * size.value_dim, size.value_dim,
                      step.cache.block(slot, block, head), position % BLOCK_TOKENS);
}

void Activate::run(Step& step, int row) { step.kernels.activate(how, step.at(out, row), out.width); }

void Multiply::run(Step& step, int row) {
  if (x.width == 1) step.kernels.scale(step.at(out, row), *step.at(x, row), out.width);
  else step.kernels.multiply(step.at(out, row), step.at(x, row), out.width);
}

void Add::run(Step& step, int row) { step.kernels.add(step.at(out, row), skip, step.at(x, row), scale, out.width); }

void ScaleCap::run(Step& step, int row) {
  if (scale != 1) step.kernels.scale(step.at(out, row), scale, out.width);
  if (cap != 0) step.kernels.cap(step.at(out, row), cap, out.width);
}

void Route::reserve(Step& step, int rows) {
  if (static_cast<int>(step.picks.size()) <= picks) step.picks.resize(picks + 1);
  auto& to = step.picks[picks];
  to.top_k = top_k;
  to.chosen.resize(std::max(to.chosen.size(), std::size_t(rows) * top_k));
  to.weights.resize(to.chosen.size());
}

namespace {

// The places of the highest, of equals those that stand first.
std::vector<int> best(const std::vector<float>& of, int count) {
  std::vector<int> order(of.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of[a] > of[b]; });
  order.resize(count);
  return order;
}

// Leaves only the experts of the best groups (DeepSeek-V2, section 2.2).
void keep_best_groups(std::vector<float>& ranking, const Route::Router& router) {
  const int size = static_cast<int>(ranking.size()) / router.groups;
  std::vector<float> merit(router.groups);
  for (int g = 0; g < router.groups; g++) {
    std::vector<float> sorted(ranking.begin() + g * size, ranking.begin() + (g + 1) * size);
    std::sort(sorted.begin(), sorted.end());
    merit[g] = std::accumulate(sorted.end() - router.group_best, sorted.end(), 0.0f);
  }
  std::vector<bool> kept(router.groups);
  for (int g : best(merit, router.top_groups)) kept[g] = true;
  for (std::size_t e = 0; e < ranking.size(); e++)
    if (!kept[e / size]) ranking[e] = -INFINITY;
}

}  // namespace

void Route::run(Step& step, int row) {
  const float* x = step.at(logits, row);
  const int count = logits.width;
  float sound = 0;
  for (int e = 0; e < count; e++) sound += x[e] * 0;
  if (sound != 0) {  // what is no number has no order: it goes on as none
    for (int i = 0; i < top_k; i++) step.picks[picks].chosen[row * top_k + i] = i, step.picks[picks].weights[row * top_k + i] = NAN;
    return;
  }
  std::vector<float> scores(x, x + count);
  if (router.softmax) {
    const float top = *std::max_element(scores.begin(), scores.end());
    for (auto& s : scores) s = std::exp(s - top);
    const float total = std::accumulate(scores.begin(), scores.end(), 0.0f);
    for (auto& s : scores) s /= total;
  } else {
    step.kernels.activate({Activation::Sigmoid}, scores.data(), count);
  }
  // in the order of the logits, which round to ties less often, where nothing else takes part
  std::vector<float> ranking = balance.empty() && router.groups == 1 ? std::vector<float>(x, x + count) : scores;
  for (std::size_t e = 0; e < balance.size(); e++) ranking[e] += balance[e];
  if (router.groups > 1) keep_best_groups(ranking, router);
  auto chosen = best(ranking, top_k);
  std::sort(chosen.begin(), chosen.end());
  float total = 0;
  for (int e : chosen) total += scores[e];
  for (int i = 0; i < top_k; i++) {
    const float weight = router.normalise ? scores[chosen[i]] / std::max(total, 1e-20f) : scores[chosen[i]];
    step.picks[picks].chosen[row * top_k + i] = chosen[i];
    step.picks[picks].weights[row * top_k + i] = router.scale * weight;
  }
}

void Combine::run(Step& step, int row) {
  const auto& from = step.picks[picks];
  float* to = step.at(out, row);
  thread_local std::vector<float> sum;
  sum.assign(out.width, 0);
  for (int i = 0; i < from.top_k; i++)
    step.kernels.add(sum.data(), 1, step.at(x, row) + i * out.width, from.weights[row * from.top_k + i], out.width);
  if (add) step.kernels.add(to, 1, sum.data(), scale, out.width);
  else std::copy(sum.begin(), sum.end(), to);
}

}  // namespace qkv
