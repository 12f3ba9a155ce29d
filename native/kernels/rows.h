// What is done to a row on its own: activations, norms, rotation, and the end of a matrix product.
#pragma once

#include <cmath>
#include <limits>

#include "../kernels.h"

namespace qkv::QKV_ISA {

inline F negative(F x) { return sub(set(0.0f), x); }

// e^x to 2e-7 of itself, and 1 exactly for 0: 2^whole times a polynomial for 2^rest, |rest| <= 1/2, whose
// coefficients make the greatest relative error least.
inline F exponential(F x) {
  x = min(set(88.3f), max(set(-104.0f), x));  // in this order what is no number stays so
  const F whole = nearest(mul(x, set(1.442695041f)));
  // x log2(e) - whole, log2(e) in two parts
  F rest = fma(x, set(1.442695041f), negative(whole));
  rest = fma(x, set(1.925963033e-8f), rest);
  F p = set(1.326472724e-3f);
  p = fma(p, rest, set(9.671512795e-3f));
  p = fma(p, rest, set(5.550733745e-2f));
  p = fma(p, rest, set(2.402224208e-1f));
  p = fma(p, rest, set(6.931469776e-1f));
  p = fma(p, rest, set(1.0f));
  return by_power(p, whole);
}

// The exponential is bounded, so that a great negative x gives next to nothing and not 1 / infinity.
inline F sigmoid(F x) { return div(set(1.0f), add(set(1.0f), exponential(negative(x)))); }

inline F tanh_of(F x) {
  const F e = exponential(mul(magnitude(x), set(-2.0f)));
  const F size = div(sub(set(1.0f), e), add(set(1.0f), e));
  return where_positive(x, size, negative(size));
}

// Abramowitz and Stegun 7.1.26: off by 1.5e-7 at most.
inline F error_function(F x) {
  const F size = magnitude(x), t = div(set(1.0f), fma(set(0.3275911f), size, set(1.0f)));
  F p = set(1.061405429f);
  p = fma(p, t, set(-1.453152027f));
  p = fma(p, t, set(1.421413741f));
  p = fma(p, t, set(-0.284496736f));
  p = fma(p, t, set(0.254829592f));
  const F y = sub(set(1.0f), mul(mul(p, t), exponential(negative(mul(size, size)))));
  return where_positive(x, y, negative(y));
}

// max and min give their second number where either is none: x stands there, and is not made a bound.
inline F activated(const Activation& how, F x) {
  switch (how.kind) {
    case Activation::Identity: return x;
    case Activation::Relu: return max(set(0.0f), x);
    case Activation::Relu2: {
      const F bounded = max(set(0.0f), x);
      return mul(bounded, bounded);
    }
    case Activation::Gelu:
      return mul(mul(x, set(0.5f)), add(set(1.0f), error_function(mul(x, set(0.70710678118f)))));
    case Activation::GeluTanh: {
      const F inner = mul(set(0.79788456080f), fma(mul(mul(x, x), x), set(0.044715f), x));
      return mul(mul(x, set(0.5f)), add(set(1.0f), tanh_of(inner)));
    }
    case Activation::QuickGelu: return mul(x, sigmoid(mul(x, set(1.702f))));
    case Activation::Silu: return mul(x, sigmoid(x));
    case Activation::Sigmoid: return sigmoid(x);
    case Activation::Tanh: return tanh_of(x);
    case Activation::ClampedSwish: {
      const F bounded = min(set(how.limit), x);
      return mul(bounded, sigmoid(mul(bounded, set(how.alpha))));
    }
  }
  return x;
}

inline F gated(const Activation& how, F gate, F up) {
  if (how.kind == Activation::ClampedSwish)
    up = add(max(set(-how.limit), min(set(how.limit), up)), set(how.offset));
  return mul(activated(how, gate), up);
}

// Runs `each` on the numbers of a row, 16 at a time: each(place, how many).
template <class Each>
inline void along(int n, Each&& each) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) each(i, LANES);
  if (i < n) each(i, n - i);
}

inline void activate(const Activation& how, float* x, int n) {
  along(n, [&](int i, int count) { store(x + i, activated(how, load(x + i, count)), count); });
}

inline void gate(const Activation& how, const float* x, float* out, int n) {
  along(n, [&](int i, int c) { store(out + i, gated(how, load(x + i, c), load(out + i, c)), c); });
}

inline void multiply(float* out, const float* x, int n) {
  along(n, [&](int i, int c) { store(out + i, mul(load(out + i, c), load(x + i, c)), c); });
}

inline void scale(float* out, float by, int n) {
  along(n, [&](int i, int c) { store(out + i, mul(load(out + i, c), set(by)), c); });
}

inline void add_scaled(float* out, float skip, const float* x, float by, int n) {
  along(n, [&](int i, int c) {
    store(out + i, fma(load(x + i, c), set(by), mul(load(out + i, c), set(skip))), c);
  });
}

inline void cap(float* out, float cap, int n) {
  along(n, [&](int i, int c) {
    store(out + i, mul(set(cap), tanh_of(div(load(out + i, c), set(cap)))), c);
  });
}

inline void clamp(float* out, float bound, int n) {
  along(n, [&](int i, int c) { store(out + i, max(set(-bound), min(set(bound), load(out + i, c))), c); });
}

inline void norm(const float* x, int n, bool centred, float eps, const float* by, const float* bias, float* out) {
  float mean = 0;
  if (centred) {
    F total = set(0.0f);
    along(n, [&](int i, int c) { total = add(total, load(x + i, c)); });
    mean = sum(total) / static_cast<float>(n);
  }
  F squares = set(0.0f);
  along(n, [&](int i, int c) {
    const F apart = within(sub(load(x + i, c), set(mean)), 0, c, 0.0f);
    squares = fma(apart, apart, squares);
  });
  const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
  along(n, [&](int i, int c) {
    F y = mul(sub(load(x + i, c), set(mean)), set(inverse));
    if (by != nullptr) y = mul(y, load(by + i, c));
    if (bias != nullptr) y = add(y, load(bias + i, c));
    store(out + i, y, c);
  });
}

// The leading pairs of a head turned: x[i] with x[pairs + i], or with its neighbour.
inline void rotate(float* x, int pairs, bool interleaved, const float* cosine, const float* sine) {
  if (interleaved) {
    for (int i = 0; i < pairs; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosine[i] - b * sine[i], x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
    return;
  }
  along(pairs, [&](int i, int n) {
    const F a = load(x + i, n), b = load(x + pairs + i, n), c = load(cosine + i, n), s = load(sine + i, n);
    store(x + i, sub(mul(a, c), mul(b, s)), n);
    store(x + pairs + i, add(mul(b, c), mul(a, s)), n);
  });
}

// N of 16 numbers into a row of out; whole vectors apart, as masked stores are slow.
inline void put(const Finish& how, F y, float* at, int n) {
  if (n == LANES) {
    if (how.add) y = fma(y, set(how.scale), load(at));
    return store(at, y);
  }
  if (how.add) y = fma(y, set(how.scale), load(at, n));
  store(at, y, n);
}

inline void finish(const Finish& how, const float* products, int count, float* out, std::size_t stride, int wide) {
  for (int row = 0; row < count; row++, products += PANEL, out += stride) {
    F first = load(products), second = load(products + LANES);
    if (how.bias != nullptr) first = add(first, load(how.bias)), second = add(second, load(how.bias + LANES));
    if (how.gated) first = gated(how.activation, first, second);
    put(how, first, out, wide < LANES ? wide : LANES);
    if (wide > LANES) put(how, second, out + LANES, wide - LANES);
  }
}

inline Summary summary(const float* x, int n) {
  constexpr int PART = 16 * LANES;  // looked through again for the place
  F sound = set(0.0f);
  float top = -std::numeric_limits<float>::infinity();
  int from = 0;
  for (int start = 0; start < n; start += PART) {
    F part = set(-std::numeric_limits<float>::infinity());
    const int end = n - start < PART ? n - start : PART;
    for (int i = 0; i < end; i += LANES) {
      const int count = end - i < LANES ? end - i : LANES;
      const F a = count == LANES ? load(x + start + i) : within(load(x + start + i, count), 0, count, x[start]);
      sound = add(sound, mul(a, set(0.0f)));
      part = max(part, a);
    }
    const float found = largest(part);
    if (found > top) top = found, from = start;
  }
  if (sum(sound) != 0) return {0, NAN, NAN};
  const F most = set(top);
  Summary found{from, top, 0};
  while (x[found.best] != top) found.best++;
  // terms of fixed lanes, and each lane's in parts: no order depends on anything but n
  double total = 0;
  for (int start = 0; start < n; start += PART) {
    F terms = set(0.0f);
    const int end = n - start < PART ? n - start : PART;
    for (int i = 0; i < end; i += LANES) {
      const int count = end - i < LANES ? end - i : LANES;
      const F term = exponential(sub(load(x + start + i, count), most));
      terms = add(terms, count == LANES ? term : within(term, 0, count, 0.0f));
    }
    total += sum(terms);
  }
  found.log_sum = static_cast<float>(top + std::log(total));
  return found;
}

}  // namespace qkv::QKV_ISA
