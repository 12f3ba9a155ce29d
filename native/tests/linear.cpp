// Rows of x times matrices of each format, and how rows of x are read.
#include <algorithm>

#include "matrices.h"

namespace qkv::tests {

namespace {

std::vector<u8> read(const Kernels& kernels, const Matrix& matrix, const std::vector<std::vector<float>>& rows) {
  const auto kind = kernels.reading(matrix.kind());
  const int tile = static_cast<int>(rows.size());
  // columns past the last are zeros, whatever was there
  std::vector<u8> to(tile_bytes(kind, matrix.padded(), tile), 0xff);
  for (int t = 0; t < tile; t++)
    kernels.read(kind, rows[t].data(), matrix.columns(), matrix.padded(), to.data(), tile, t);
  return to;
}

// A row as products see it, in double precision.
std::vector<double> as_read(Reading kind, const std::vector<float>& x) {
  std::vector<double> found(x.begin(), x.end());
  if (kind == Reading::Pairs || kind == Reading::Rows)
    for (std::size_t c = 0; c < x.size(); c++) found[c] = to_pairs(x[c]);
  if (kind == Reading::Codes)
    for (std::size_t c = 0; c < x.size(); c += GROUP) {
      float most = 0;
      for (int i = 0; i < GROUP; i++) most = std::max(most, std::fabs(x[c + i]));
      for (int i = 0; i < GROUP; i++) found[c + i] = most == 0 ? 0 : std::nearbyint(x[c + i] * (127 / most)) * (most / 127.0);
    }
  return found;
}

// Rows of the panel `number` where both parts of a gate lie in turn, or one matrix below the other.
std::vector<int> rows_of(int number, int rows, bool paired) {
  std::vector<int> found;
  for (int r = 0; r < PANEL; r++) {
    const int at = paired ? number * LANES + r % LANES : number * PANEL + r;
    found.push_back(at >= (paired ? rows / 2 : rows) ? -1 : paired ? r / LANES * (rows / 2) + at : at);
  }
  return found;
}

// The products of `matrix`, whose rows are those of `from`, with a tile of rows.
void products(const Kernels& kernels, Record& record, const Matrix& matrix, const Given& from, bool paired, int tile,
              Numbers& numbers) {
  const auto kind = kernels.reading(matrix.kind());
  std::vector<std::vector<float>> rows;
  for (int t = 0; t < tile; t++) rows.push_back(numbers.vector(from.columns, 2));
  const auto read_rows = read(kernels, matrix, rows);
  std::vector<std::vector<double>> seen;
  for (const auto& row : rows) seen.push_back(as_read(kind, row));
  for (int panel = 0; panel < matrix.panels(); panel++) {
    std::vector<float> out(tile * PANEL, NO_NUMBER);
    const Pass pass{panel % 2, 2, panel % 3 ? matrix.panel(0) : nullptr, matrix.panel_bytes()};  // changes no number
    kernels.linear(matrix, panel, read_rows.data(), tile, pass, out.data());
    const auto places = rows_of(panel, from.rows, paired);
    for (int t = 0; t < tile; t++) {
      for (int r = 0; r < PANEL; r++) {
        double want = 0, size = 0;
        for (int c = 0; c < from.columns && places[r] >= 0; c++) {
          const std::size_t at = std::size_t(places[r]) * from.columns + c;
          want += from.values[at] * seen[t][c], size += from.sizes[at] * std::fabs(seen[t][c]);
        }
        // a product and a sum for each column; a scale of x and of the weights besides
        record.near(out[t * PANEL + r], want, (2.0 * from.columns + 8) * UNIT * size,
                    "tile, panel, row of x and of weights", {tile, panel, t, r});
      }
      std::vector<float> alone(PANEL);
      kernels.linear(matrix, panel, read(kernels, matrix, {rows[t]}).data(), 1, {1}, alone.data());
      record.same({out.begin() + t * PANEL, out.begin() + (t + 1) * PANEL}, alone,
                  "not the same as alone: tile, panel, row", {tile, panel, t});
    }
  }
}

int most(const Kernels& kernels, const Matrix& matrix) {
  return kernels.most_rows(kernels.reading(matrix.kind()), MOST_ROWS);
}

void row_values(Record& record, const Matrix& matrix, const Given& from) {
  std::vector<float> row(from.columns);
  for (int r = 0; r < from.rows; r++) {
    matrix.row(r, row.data());
    for (int c = 0; c < from.columns; c++) {
      const std::size_t at = std::size_t(r) * from.columns + c;
      record.near(row[c], from.values[at], 4 * UNIT * from.sizes[at],
                  "row, column", {r, c});
    }
  }
}

// What is no number, or infinite, must not come out as a number.
void unsound(const Kernels& kernels, Record& record, const Matrix& matrix) {
  for (const float bad : {NO_NUMBER, INFINITE, -INFINITE})
    for (int place = 0; place < matrix.columns(); place += 5) {
      std::vector<float> x(matrix.columns(), 0.5f), out(PANEL);
      x[place] = bad;
      kernels.linear(matrix, 0, read(kernels, matrix, {x}).data(), 1, {}, out.data());
      bool any = false;
      for (float each : out) any |= std::isfinite(each);
      record.that(!any, "a number from what is none, at", {place});
    }
}

}  // namespace

void check_linear(const Kernels& kernels, Record& record) {
  Numbers numbers(1);
  Arena arena;
  for (const Format format : FORMATS) {
    const auto& kind = layout(format);
    record.about(std::string(kind.name));
    const int columns = kind.block == 256 ? 768 : kind.block == 32 ? 352 : 37, rows = 77;
    const auto from = given(format, rows, columns, numbers);
    const Matrix matrix(arena, format, columns, {{from.data.data(), rows}}, false);
    row_values(record, matrix, from);
    for (int tile = 1; tile <= most(kernels, matrix); tile++)
      products(kernels, record, matrix, from, false, tile, numbers);
    unsound(kernels, record, matrix);

    // two parts of 24 rows: a panel of 16 and 16, and one of 8 and 8 with nothing between
    const auto pair = given(format, 48, columns, numbers);
    const std::size_t second = pair.data.size() / 2;
    const Matrix gate(arena, format, columns, {{pair.data.data(), 24}, {pair.data.data() + second, 24}}, true);
    products(kernels, record, gate, pair, true, 1, numbers);
    // a matrix made of the same parts below each other
    const Matrix stacked(arena, format, columns, {{pair.data.data(), 24}, {pair.data.data() + second, 24}}, false);
    products(kernels, record, stacked, pair, false, 1, numbers);
  }
}

void check_read(const Kernels& kernels, Record& record) {
  Numbers numbers(2);
  const int columns = 96, tile = 3;
  for (int place = 0; place < tile; place++) {
    auto x = numbers.vector(columns, 3);
    std::fill(x.begin() + GROUP, x.begin() + 2 * GROUP, 0.0f);
    std::vector<u8> to(tile_bytes(Reading::Codes, columns, tile), 0x55);
    kernels.read(Reading::Codes, x.data(), columns, columns, to.data(), tile, place);
    for (int g = 0; g < columns / GROUP; g++) {
      const u8* record_ = to.data() + g * tile * 48;
      float numbers_[2];
      for (int i = 0; i < 2; i++) std::memcpy(&numbers_[i], record_ + tile * (GROUP + 4 * i) + place * 4, 4);
      const float most = std::fabs(*std::max_element(x.begin() + g * GROUP, x.begin() + (g + 1) * GROUP,
                                                     [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
      record.near(numbers_[0], most / 127.0, 2 * UNIT * most, "scale of group", {g});
      int sum = 0, first = 0;
      for (int i = 0; i < GROUP; i++) {
        const int code = static_cast<i8>(record_[place * GROUP + i]);
        record.near(code * (most / 127.0), x[g * GROUP + i], most / 127 * 0.50001, "code", {place, g, i});
        sum += code, first += i < LANES ? code : 0;
      }
      record.near(numbers_[1], numbers_[0] * static_cast<double>(sum), UNIT * std::fabs(numbers_[1]), "scale * sum");
      record.near(word_at(record_ + tile * (GROUP + 8) + place * 4), sum, 0, "sum");
      record.near(word_at(record_ + tile * (GROUP + 12) + place * 4), first, 0, "sum of the first 16");
    }
  }
  // bf16 in pairs, also of a column past the last; halves between two neighbours go to the even one
  auto x = numbers.vector(37);
  x[0] = 1 + 0x1p-8f, x[1] = 1 + 3 * 0x1p-8f, x[2] = NO_NUMBER;
  std::vector<u8> pairs(tile_bytes(Reading::Pairs, 38, 2), 0x55);
  kernels.read(Reading::Pairs, x.data(), 37, 38, pairs.data(), 2, 1);
  for (int c = 0; c < 38; c++) {
    const float got = from_bf16(half_at(pairs.data() + (c / 2 * 2 + 1) * 4 + c % 2 * 2));
    if (c == 2) record.that(std::isnan(got), "what is no number stays so in bf16");
    else record.near(got, c < 37 ? to_pairs(x[c]) : 0, 0, "bf16 column", {c});
  }
  std::vector<u8> floats(tile_bytes(Reading::Floats, 37, 2));
  kernels.read(Reading::Floats, x.data(), 37, 37, floats.data(), 2, 1);
  for (int c = 0; c < 37; c++)
    record.that(std::memcmp(floats.data() + (c * 2 + 1) * 4, &x[c], 4) == 0, "float column", {c});
}

}  // namespace qkv::tests
