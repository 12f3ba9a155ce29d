// The runtime as the module qkv.runtime._native; qkv/runtime/native.py is what uses it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "bandwidth.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace qkv;

namespace {

using Place = std::tuple<int, int, int>;  // buffer, start, width
using How = std::tuple<std::string, float, float, float>;  // activation, alpha, limit, offset
template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Piece = std::tuple<std::shared_ptr<Matrix>, int, std::optional<Array<float>>>;  // columns of out from, bias

Span span(const Place& at) { return {std::get<0>(at), std::get<1>(at), std::get<2>(at)}; }

Activation activation(const How& how) {
  static const std::vector<std::string> names{"identity", "relu",    "relu2", "gelu", "gelu_tanh",
                                              "quick_gelu", "silu", "sigmoid", "tanh", "clamped_swish"};
  const auto found = std::find(names.begin(), names.end(), std::get<0>(how));
  if (found == names.end()) throw std::invalid_argument("no activation " + std::get<0>(how));
  return {static_cast<Activation::Kind>(found - names.begin()), std::get<1>(how), std::get<2>(how), std::get<3>(how)};
}

std::vector<float> floats(const std::optional<Array<float>>& from) {
  return from ? std::vector<float>(from->data(), from->data() + from->size()) : std::vector<float>();
}

std::vector<Weights> weights(const std::vector<Piece>& pieces) {
  std::vector<Weights> found;
  for (const auto& [matrix, column, bias] : pieces) {
    found.push_back({matrix, column, floats(bias)});
    if (bias) found.back().bias.resize(matrix->panels() * PANEL);
  }
  return found;
}

std::shared_ptr<Matrix> matrix(Arena& arena, const std::string& format, int columns,
                               const std::vector<std::tuple<Array<u8>, int>>& parts, bool paired) {
  const auto& kind = layout(format);
  std::vector<Part> given;
  for (const auto& [data, rows] : parts) {
    if (data.size() != std::size_t(rows) * (columns / kind.block) * kind.block_bytes)
      throw std::invalid_argument("the bytes of a matrix do not fit its size");
    given.push_back({data.data(), rows});
  }
  nb::gil_scoped_release released;
  return std::make_shared<Matrix>(arena, kind.format, columns, given, paired);
}

// A program and what it was built for.
struct Built {
  Built(std::vector<int> widths, int output, const std::string& set) : kernels(qkv::kernels(set)), program(std::move(widths), output) {}
  const Kernels& kernels;
  Program program;
  std::vector<TakeRows*> tables;
};

Rows rows_of(const Array<i32>& tokens, const Array<i32>& sequences, const Array<i32>& positions,
             const std::optional<Array<i32>>& types, const Array<i32>& wanted) {
  return {static_cast<int>(tokens.size()), tokens.data(), sequences.data(), positions.data(),
          types ? types->data() : nullptr, static_cast<int>(wanted.size()), wanted.data()};
}

// What a table or a list of rows does not have is refused, before anything is changed.
void check(const Built& self, const Array<i32>& tokens, const Array<i32>& sequences, const Array<i32>& positions,
           const std::optional<Array<i32>>& types, const Array<i32>& wanted) {
  const Rows rows = rows_of(tokens, sequences, positions, types, wanted);
  for (const auto* take : self.tables) {
    const i32* given = take->by == TakeRows::Token ? rows.tokens : take->by == TakeRows::Position ? rows.positions : rows.types;
    for (int row = 0; given != nullptr && row < rows.count; row++)
      if (given[row] + take->offset < 0 || given[row] + take->offset >= take->table->rows())
        throw std::out_of_range(std::to_string(given[row]));
  }
  for (int i = 0; i < rows.wanted; i++)
    if (rows.wanted_rows[i] < 0 || rows.wanted_rows[i] >= rows.count) throw nb::value_error("a row that is wanted is not there");
}

void linear(Built& self, const Place& x, const Place& out, const std::vector<Piece>& pieces, bool add, float scale,
            const std::optional<How>& gate) {
  Finish finish;
  finish.add = add, finish.scale = scale, finish.gated = gate.has_value();
  if (gate) finish.activation = activation(*gate);
  auto given = weights(pieces);
  bool read[READINGS] = {};
  for (const auto& each : given) {
    const auto kind = self.kernels.reading(each.matrix->kind());
    if (!read[static_cast<int>(kind)]) self.program.add(std::make_unique<Read>(span(x), kind, each.matrix->padded()));
    read[static_cast<int>(kind)] = true;
  }
  self.program.add(std::make_unique<Linear>(span(out), std::move(given), finish));
}

void expert_linear(Built& self, const Place& x, const Place& out, int picks, int top_k, const std::vector<Piece>& experts,
                   const std::optional<How>& gate, bool from_picks) {
  Finish finish;
  finish.gated = gate.has_value();
  if (gate) finish.activation = activation(*gate);
  auto given = weights(experts);
  const auto& first = *given.at(0).matrix;
  self.program.add(std::make_unique<ExpertRead>(span(x), self.kernels.reading(first.kind()), first.columns(), first.padded(),
                                                from_picks ? top_k : 1));
  self.program.add(std::make_unique<ExpertLinear>(span(out), picks, std::move(given), finish, from_picks));
}

void attend(Built& self, const Place& query, const Place& far, const Place& out, int slot, std::tuple<int, int> heads,
            float scale, std::tuple<std::optional<int>, std::optional<int>, std::optional<int>, int> sight, float cap,
            const std::optional<Array<float>>& sinks, const std::optional<Array<float>>& slopes,
            const std::optional<Array<float>>& bias, int reach) {
  Attention a{span(out), span(query), span(far), slot, std::get<0>(heads), std::get<1>(heads), scale};
  std::tie(a.before, a.after, a.chunk, a.first) = sight;
  if (a.first > SPLIT) throw std::invalid_argument("too many first keys");
  a.cap = cap, a.sinks = floats(sinks), a.slopes = floats(slopes), a.bias = floats(bias), a.reach = reach;
  auto phase = std::make_unique<Attend>(std::move(a));
  auto end = std::make_unique<AttendEnd>(*phase);
  self.program.add(std::move(phase));
  self.program.add(std::move(end));
}

void take_rows(Built& self, const Place& out, std::shared_ptr<Matrix> table, int by, float scale, int offset, bool add) {
  auto operation = std::make_unique<TakeRows>(span(out), std::move(table), static_cast<TakeRows::By>(by), scale, offset, add);
  self.tables.push_back(operation.get());
  self.program.add(std::move(operation));
}

void run(Built& self, Array<i32> tokens, Array<i32> sequences, Array<i32> positions, std::optional<Array<i32>> types,
         Array<i32> wanted,
         const std::vector<std::tuple<nb::ndarray<const i32, nb::ndim<2>, nb::c_contig, nb::device::cpu>, Array<i32>>>& tables,
         Cache& cache, Workers& workers,
         std::optional<nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>> answers) {
  const Rows rows = rows_of(tokens, sequences, positions, types, wanted);
  std::vector<Table> given;
  for (const auto& [blocks, lengths] : tables) given.push_back({blocks.data(), blocks.shape(1), lengths.data()});
  float* to = answers ? answers->data() : nullptr;
  nb::gil_scoped_release released;
  self.program.run(rows, given, cache, workers, self.kernels, to);
}

// best, top and log_sum of each row
void summarise(Built& self, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> answers, Workers& workers,
               nb::ndarray<i32, nb::ndim<1>, nb::c_contig, nb::device::cpu> best,
               nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> top,
               nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> log_sum) {
  std::vector<Summary> found(answers.shape(0));
  {
    nb::gil_scoped_release released;
    self.program.summarise(answers.data(), static_cast<int>(found.size()), workers, self.kernels, found.data());
  }
  for (std::size_t i = 0; i < found.size(); i++)
    best.data()[i] = found[i].best, top.data()[i] = found[i].top, log_sum.data()[i] = found[i].log_sum;
}

template <class Operation, class... Given>
void add(Built& self, Given&&... given) {
  self.program.add(std::make_unique<Operation>(std::forward<Given>(given)...));
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const auto* each : kernel_sets()) names.emplace_back(each->name);
    return names;
  });
  m.def("read_bandwidth", &read_bandwidth, "threads"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Matrix>(m, "Matrix")
      .def("__init__", [](Matrix*) { throw std::invalid_argument("use matrix()"); })
      .def_prop_ro("rows", &Matrix::rows)
      .def_prop_ro("columns", &Matrix::columns)
      .def_prop_ro("bytes", &Matrix::bytes)
      .def("row", [](const Matrix& self, int number) {
        if (number < 0 || number >= self.rows()) throw std::out_of_range(std::to_string(number));
        auto* values = new float[self.columns()];
        self.row(number, values);
        nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        return nb::ndarray<nb::numpy, float, nb::ndim<1>>(values, {std::size_t(self.columns())}, owner);
      });
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  m.def("matrix", &matrix, "arena"_a, "format"_a, "columns"_a, "parts"_a, "paired"_a = false);

  nb::class_<Workers>(m, "Workers").def(nb::init<int>()).def_prop_ro("count", &Workers::count);

  nb::class_<Cache>(m, "Cache")
      .def("__init__",
           [](Cache* self, const std::vector<std::tuple<int, int, int, int>>& slots, int groups, int kept) {
             std::vector<Slot> given;
             for (const auto& [group, heads, key, value] : slots) {
               if (std::max(key, value) > MOST_DIMENSIONS) throw std::invalid_argument("a head of too many dimensions");
               if (group < 0 || group >= groups) throw std::invalid_argument("no such group of slots");
               given.push_back({group, heads, key, value});
             }
             new (self) Cache(given, groups, static_cast<Kept>(kept));
           })
      .def("reserve", &Cache::reserve)
      .def("clear", &Cache::clear)
      .def("copy", &Cache::copy)
      .def("block_bytes", &Cache::block_bytes);

  nb::class_<Built>(m, "Program")
      .def(nb::init<std::vector<int>, int, const std::string&>(), "widths"_a, "output"_a, "instruction_set"_a = "")
      .def_prop_ro("instruction_set", [](const Built& self) { return std::string(self.kernels.name); })
      .def("take_rows", &take_rows)
      .def("sinusoids", [](Built& self, const Place& out, double base, bool halves) { add<Sinusoids>(self, span(out), base, halves); })
      .def("angles", [](Built& self, int set, std::vector<float> by, float factor, int most) { add<Angles>(self, set, std::move(by), factor, most); })
      .def("rotate", [](Built& self, const Place& out, const Place& x, int heads, int set, int pairs, bool interleaved) {
        add<Rotate>(self, span(out), span(x), heads, set, pairs, interleaved);
      })
      .def("pick", [](Built& self, const std::vector<std::tuple<Place, Place>>& places) {
        std::vector<std::pair<Span, Span>> spans;
        for (const auto& [out, x] : places) spans.emplace_back(span(out), span(x));
        self.program.pick(spans);
      })
      .def("norm", [](Built& self, const Place& out, const Place& x, bool centred, float eps, std::optional<Array<float>> scale,
                      std::optional<Array<float>> bias, int groups) {
        add<Norm>(self, span(out), span(x), centred, eps, floats(scale), floats(bias), groups);
      }, "out"_a, "x"_a, "centred"_a, "eps"_a, "scale"_a.none(), "bias"_a.none(), "groups"_a)
      .def("clamp", [](Built& self, const Place& out, float bound) { add<Clamp>(self, span(out), bound); })
      .def("store", [](Built& self, int slot, const Place& key, const Place& value) { add<Store>(self, slot, span(key), span(value)); })
      .def("activate", [](Built& self, const Place& out, const How& how) { add<Activate>(self, span(out), activation(how)); })
      .def("multiply", [](Built& self, const Place& out, const Place& x) { add<Multiply>(self, span(out), span(x)); })
      .def("add", [](Built& self, const Place& out, const Place& x, float scale, float skip) {
        add<Add>(self, span(out), span(x), scale, skip);
      })
      .def("scale_cap", [](Built& self, const Place& out, float scale, float cap) { add<ScaleCap>(self, span(out), scale, cap); })
      .def("route", [](Built& self, int picks, const Place& logits, bool softmax, bool normalise, float scale,
                       std::tuple<int, int, int> groups, int top_k, std::optional<Array<float>> balance) {
        const auto [count, top, best] = groups;
        add<Route>(self, picks, span(logits), Route::Router{softmax, normalise, scale, count, top, best}, top_k, floats(balance));
      }, "picks"_a, "logits"_a, "softmax"_a, "normalise"_a, "scale"_a, "groups"_a, "top_k"_a, "balance"_a.none())
      .def("combine", [](Built& self, const Place& out, const Place& x, int picks, bool add_, float scale) {
        add<Combine>(self, span(out), span(x), picks, add_, scale);
      })
      .def("linear", &linear, "x"_a, "out"_a, "pieces"_a, "add"_a, "scale"_a, "gate"_a.none())
      .def("expert_linear", &expert_linear, "x"_a, "out"_a, "picks"_a, "top_k"_a, "experts"_a, "gate"_a.none(), "from_picks"_a)
      .def("attend", &attend, "query"_a, "far"_a, "out"_a, "slot"_a, "heads"_a, "scale"_a, "sight"_a, "cap"_a, "sinks"_a.none(),
           "slopes"_a.none(), "bias"_a.none(), "reach"_a)
      .def("check", &check, "tokens"_a, "sequences"_a, "positions"_a, "types"_a.none(), "wanted"_a)
      .def("summarise", &summarise)
      .def("run", &run, "tokens"_a, "sequences"_a, "positions"_a, "types"_a.none(), "wanted"_a, "tables"_a, "cache"_a,
           "workers"_a, "answers"_a.none());
}
