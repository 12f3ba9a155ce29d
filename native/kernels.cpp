// Compiled once for each instruction set: QKV_ISA is its name, QKV_VECTOR_HEADER its vectors.
#include QKV_VECTOR_HEADER

#include "kernels/attend.h"
#include "kernels/linear.h"
#include "kernels/rows.h"
#ifdef QKV_TILES
#include "kernels/attend_tiles.h"
#include "kernels/tiles.h"
#endif

#define QKV_TEXT(x) #x
#define QKV_NAME(x) QKV_TEXT(x)

namespace qkv::QKV_ISA {

#ifdef QKV_TILES
constexpr auto PAIRS = Reading::Rows;
constexpr int LARGE_CODE_TILE = MOST_ROWS, PAIR_ROWS = MOST_ROWS;
constexpr auto PRODUCTS = linear_in_tiles;
constexpr auto QUERIES = queries_of_tiles;
constexpr auto PACK = pack_for_tiles;
constexpr auto ATTEND = attend_in_tiles;
#else
constexpr auto PAIRS = Reading::Pairs;
constexpr int LARGE_CODE_TILE = CODE_TILE, PAIR_ROWS = PLAIN_TILE;
constexpr auto PRODUCTS = linear;
constexpr auto QUERIES = queries;
constexpr auto PACK = pack;
constexpr auto ATTEND = attend;
#endif

extern const Kernels TABLE;
const Kernels TABLE{QKV_NAME(QKV_ISA), PAIRS, CODE_TILE, LARGE_CODE_TILE, PAIR_ROWS, PLAIN_TILE, read, PRODUCTS,
                    finish, norm, rotate, activate, gate, multiply, scale, add_scaled, cap, clamp,
                    keep, QUERIES, PACK, ATTEND, merge, summary};

}  // namespace qkv::QKV_ISA
