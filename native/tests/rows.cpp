// What is done to single rows, against <cmath>.
#include <algorithm>
#include <functional>

#include "check.h"

namespace qkv::tests {

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double activated(const Activation& how, double x) {
  switch (how.kind) {
    case Activation::Identity: return x;
    case Activation::Relu: return x > 0 ? x : 0;
    case Activation::Relu2: return x > 0 ? x * x : 0;
    case Activation::Gelu: return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::GeluTanh: return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::QuickGelu: return x * sigmoid(1.702 * x);
    case Activation::Silu: return x * sigmoid(x);
    case Activation::Sigmoid: return sigmoid(x);
    case Activation::Tanh: return std::tanh(x);
    case Activation::ClampedSwish: return std::min<double>(x, how.limit) * sigmoid(how.alpha * std::min<double>(x, how.limit));
  }
  return x;
}

double gated(const Activation& how, double gate, double up) {
  if (how.kind == Activation::ClampedSwish) up = std::clamp<double>(up, -how.limit, how.limit) + how.offset;
  return activated(how, gate) * up;
}

// erf is a polynomial good to 1.5e-7, and 1 - e^x of a small x loses its last digits: both absolute. The
// others are e^x, whose error grows with x as that of x does; it is 2^-126 at least.
double tolerance(const Activation& how, double x) {
  const double want = std::fabs(activated(how, x));
  switch (how.kind) {
    case Activation::Gelu:
    case Activation::GeluTanh: return 2e-7 * (1 + std::fabs(x));
    case Activation::Tanh: return 3e-7;
    default: return (8 + 4 * std::fabs(x)) * UNIT * want + (1 + std::fabs(x)) * 0x1p-125;
  }
}

std::vector<Activation> activations() {
  std::vector<Activation> found;
  for (int kind = Activation::Identity; kind <= Activation::Tanh; kind++) found.push_back({static_cast<Activation::Kind>(kind)});
  found.push_back({Activation::ClampedSwish, 1.702f, 7, 1});
  return found;
}

std::vector<float> points(Numbers& numbers, int n) {
  std::vector<float> found = {0.0f, -0.0f, 1e-30f, -1e-30f, 20, -20, 80, -80, 7, -7, 0.5f};
  while (static_cast<int>(found.size()) < n) found.push_back(numbers.between(-10, 10));
  found.resize(n);
  return found;
}

void check_activations(const Kernels& kernels, Record& record) {
  Numbers numbers(3);
  for (const auto& how : activations())
    for (int n : {1, 7, 16, 33, 600}) {
      const auto x = points(numbers, n), up = numbers.vector(n, 9);
      auto y = x, z = up;
      y.push_back(42), z.push_back(42);
      kernels.activate(how, y.data(), n);
      kernels.gate(how, x.data(), z.data(), n);
      for (int i = 0; i < n; i++) {
        record.near(y[i], activated(how, x[i]), tolerance(how, x[i]), "activation", {how.kind, n, i});
        record.near(z[i], gated(how, x[i], up[i]), (tolerance(how, x[i]) + 4 * UNIT * std::fabs(activated(how, x[i]))) * 10,
                    "gate", {how.kind, n, i});
      }
      record.that(y[n] == 42 && z[n] == 42, "what follows a row is left alone", {how.kind, n});
    }
}

void check_unsound(const Kernels& kernels, Record& record) {
  for (const auto& how : activations()) {
    std::vector<float> x(20, NO_NUMBER), gate(20, NO_NUMBER), ones(20, 1.0f), up(20, NO_NUMBER);
    kernels.activate(how, x.data(), 20);
    kernels.gate(how, gate.data(), ones.data(), 20);
    std::vector<float> one(20, 1.0f);
    kernels.gate(how, one.data(), up.data(), 20);
    for (int i : {0, 15, 16, 19}) {
      record.that(std::isnan(x[i]), "an activation of what is no number", {how.kind, i});
      record.that(std::isnan(ones[i]), "a gate that is no number", {how.kind, i});
      record.that(std::isnan(up[i]), "a gate of what is no number", {how.kind, i});
    }
  }
  const struct {
    Activation::Kind kind;
    float x, want;
  } ends[] = {{Activation::Relu, INFINITE, INFINITE}, {Activation::Relu, -INFINITE, 0}, {Activation::Sigmoid, INFINITE, 1},
              {Activation::Sigmoid, -INFINITE, 0},    {Activation::Tanh, INFINITE, 1},  {Activation::Tanh, -INFINITE, -1},
              {Activation::Silu, INFINITE, INFINITE}, {Activation::Gelu, INFINITE, INFINITE}};
  for (const auto& end : ends) {
    float x = end.x;
    kernels.activate({end.kind}, &x, 1);
    record.near(x, end.want, 0x1p-125, "an activation of an infinite number", {end.kind});
  }
  for (int i : {0, 5, 19}) {
    std::vector<float> x(20, 1.0f), capped(20, 1.0f), y(20, 1.0f), z(20);
    x[i] = capped[i] = y[i] = NO_NUMBER;
    kernels.clamp(x.data(), 2, 20);
    kernels.cap(capped.data(), 2, 20);
    kernels.norm(y.data(), 20, true, 1e-5f, nullptr, nullptr, z.data());
    record.that(std::isnan(x[i]) && std::isnan(capped[i]), "a bound on what is no number", {i});
    for (float each : z) record.that(std::isnan(each), "a norm of what is no number", {i});
  }
}

void check_elementwise(const Kernels& kernels, Record& record) {
  Numbers numbers(4);
  using Each = std::function<double(double, double)>;  // of out and x
  const auto compare = [&](const char* name, int n, auto&& run, const Each& want) {
    const auto x = numbers.vector(n, 4), before = numbers.vector(n, 4);
    auto out = before;
    out.push_back(42);
    run(out.data(), x.data());
    for (int i = 0; i < n; i++) record.near(out[i], want(before[i], x[i]), 64 * UNIT, name, {n, i});
    record.that(out[n] == 42, "what follows is left alone");
  };
  for (int n : {1, 15, 16, 17, 100}) {
    compare("multiply", n, [&](float* out, const float* x) { kernels.multiply(out, x, n); }, [](double o, double x) { return o * x; });
    compare("scale", n, [&](float* out, const float*) { kernels.scale(out, 0.3f, n); }, [](double o, double) { return o * 0.3f; });
    compare("add", n, [&](float* out, const float* x) { kernels.add(out, 0.7f, x, -1.3f, n); },
            [](double o, double x) { return o * 0.7f + x * -1.3f; });
    compare("cap", n, [&](float* out, const float*) { kernels.cap(out, 3, n); }, [](double o, double) { return 3 * std::tanh(o / 3); });
    compare("clamp", n, [&](float* out, const float*) { kernels.clamp(out, 1.5f, n); },
            [](double o, double) { return std::clamp(o, -1.5, 1.5); });
  }
}

void check_norm(const Kernels& kernels, Record& record) {
  Numbers numbers(5);
  for (int n : {1, 15, 16, 17, 100, 576})
    for (int which = 0; which < 8; which++) {
      const bool centred = which & 1;
      auto x = numbers.vector(n, 2);
      for (float& each : x) each += 0.5f;
      const auto by = numbers.vector(n), bias = numbers.vector(n);
      std::vector<float> out(n + 1, 42);
      kernels.norm(x.data(), n, centred, 1e-3f, which & 2 ? by.data() : nullptr, which & 4 ? bias.data() : nullptr, out.data());
      double mean = 0, squares = 0;
      for (float each : x) mean += centred ? each / static_cast<double>(n) : 0;
      for (float each : x) squares += (each - mean) * (each - mean) / n;
      for (int i = 0; i < n; i++) {
        double want = (x[i] - mean) / std::sqrt(squares + 1e-3f);
        want = want * (which & 2 ? by[i] : 1) + (which & 4 ? bias[i] : 0);
        // sums of n / 16 numbers in each lane; a row of one has nothing left of it but rounding
        record.near(out[i], want, (n / 16.0 + 24) * UNIT * 4, "norm", {n, which, i});
      }
      record.that(out[n] == 42, "norm leaves alone what follows", {n});
    }
}

void check_rotate(const Kernels& kernels, Record& record) {
  Numbers numbers(6);
  for (int pairs : {1, 8, 16, 20, 64})
    for (const bool interleaved : {false, true}) {
      const auto x = numbers.vector(2 * pairs + 3), cosine = numbers.vector(pairs), sine = numbers.vector(pairs);
      auto out = x;
      kernels.rotate(out.data(), pairs, interleaved, cosine.data(), sine.data());
      for (int i = 0; i < pairs; i++) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : pairs + i;
        const double c = cosine[i], s = sine[i];
        record.near(out[a], x[a] * c - x[b] * s, 4 * UNIT, "rotate", {pairs, interleaved, a});
        record.near(out[b], x[b] * c + x[a] * s, 4 * UNIT, "rotate", {pairs, interleaved, b});
      }
      for (int i = 2 * pairs; i < 2 * pairs + 3; i++) record.that(out[i] == x[i], "rotate leaves alone what follows");
    }
}

struct Case {
  bool bias, gated, add;
  int wide;
  Activation how;
};

void finish_case(const Kernels& kernels, Record& record, const Case& c, Numbers& numbers) {
  const int count = 3, stride = 40;
  const auto products = numbers.vector(count * PANEL, 5), bias = numbers.vector(PANEL), before = numbers.vector(count * stride);
  auto out = before;
  Finish finish;
  finish.bias = c.bias ? bias.data() : nullptr;
  finish.gated = c.gated, finish.add = c.add, finish.scale = c.add ? 0.6f : 1, finish.activation = c.how;
  kernels.finish(finish, products.data(), count, out.data(), stride, c.wide);
  for (int row = 0; row < count; row++)
    for (int i = 0; i < stride; i++) {
      const auto product = [&](int at) { return products[row * PANEL + at] + (c.bias ? static_cast<double>(bias[at]) : 0); };
      double want = before[row * stride + i], allowed = 0;
      if (i < c.wide) {
        const double y = c.gated ? gated(c.how, product(i), product(LANES + i)) : product(i);
        allowed = 16 * UNIT * (1 + std::fabs(y)) + (c.gated ? 8 * tolerance(c.how, product(i)) : 0);
        want = c.add ? want + 0.6f * y : y;
      }
      record.near(out[row * stride + i], want, allowed,
                  "finish: bias, gated, add, wide, activation, row, column", {c.bias, c.gated, c.add, c.wide, c.how.kind, row, i});
    }
}

}  // namespace

void check_finish(const Kernels& kernels, Record& record) {
  Numbers numbers(7);
  for (int which = 0; which < 4; which++) {
    for (int wide : {1, 5, 16, 17, 32}) finish_case(kernels, record, {bool(which & 1), false, bool(which & 2), wide, {}}, numbers);
    for (const auto& how : activations())
      for (int wide : {3, 16}) finish_case(kernels, record, {bool(which & 1), true, bool(which & 2), wide, how}, numbers);
  }
}

void check_summary(const Kernels& kernels, Record& record) {
  Numbers numbers(11);
  for (int n : {1, 2, 15, 16, 17, 255, 256, 257, 1000, 49152}) {
    record.about("summary of " + std::to_string(n));
    for (float size : {0.0f, 1.0f, 30.0f, 1e30f}) {
      auto x = numbers.vector(n, size);
      const int at = numbers.below(n), again = at + numbers.below(n - at);
      const float most = *std::max_element(x.begin(), x.end()) + size / 8;
      x[at] = x[again] = most;  // the first of equals is told
      double sum = 0;
      for (float each : x) sum += std::exp(double(each) - most);
      const auto found = kernels.summary(x.data(), n);
      record.that(size == 0 ? found.best == 0 : found.best == at, "best", {at, again});
      record.that(found.top == most, "top", {at});
      record.near(found.log_sum, most + std::log(sum), 1e-6 + std::fabs(most) * UNIT, "log of the sum", {at});
      for (float wrong : {NAN, INFINITY, -INFINITY}) {
        x[again] = wrong;
        const auto none = kernels.summary(x.data(), n);
        record.that(std::isnan(none.top) && std::isnan(none.log_sum) && none.best == 0, "no number", {again});
      }
    }
  }
}

void check_rows(const Kernels& kernels, Record& record) {
  check_activations(kernels, record);
  check_unsound(kernels, record);
  check_elementwise(kernels, record);
  check_norm(kernels, record);
  check_rotate(kernels, record);
  check_summary(kernels, record);
}

}  // namespace qkv::tests
