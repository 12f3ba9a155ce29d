// Compiled once for each instruction set: QKV_ISA is its name, QKV_VECTOR_HEADER its vectors.
#include QKV_VECTOR_HEADER

#include "kernels/attend.h"
#include "kernels/linear.h"
#include "kernels/rows.h"

#define QKV_TEXT(x) #x
#define QKV_NAME(x) QKV_TEXT(x)

namespace qkv::QKV_ISA {

extern const Kernels TABLE;
const Kernels TABLE{QKV_NAME(QKV_ISA), CODE_TILE, PLAIN_TILE, QUERY_TILE, read,  linear,     finish, norm,
                    rotate,            activate,  gate,       multiply,   scale, add_scaled, cap,    clamp,
                    keep,              pack,      attend,     merge,  summary};

}  // namespace qkv::QKV_ISA
