// Which of the kernels that were built this processor can run.
#include <stdexcept>

#include "kernels.h"

#if defined(QKV_HAVE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(QKV_HAVE_NEON) && defined(__linux__)
#include <sys/auxv.h>

#include <asm/hwcap.h>
#endif

namespace qkv {

#ifdef QKV_HAVE_AMX
namespace amx { extern const Kernels TABLE; }
#endif
#ifdef QKV_HAVE_AVX512
namespace avx512 { extern const Kernels TABLE; }
#endif
#ifdef QKV_HAVE_AVX2
namespace avx2 { extern const Kernels TABLE; }
#endif
#ifdef QKV_HAVE_NEON
namespace neon { extern const Kernels TABLE; }
#endif
#ifdef QKV_HAVE_PORTABLE
namespace portable { extern const Kernels TABLE; }
#endif

#if defined(QKV_HAVE_AVX512)
namespace {

bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("bmi2");
}

}  // namespace
#endif

#if defined(QKV_HAVE_AMX)
namespace {

// Linux lets a process use the tile registers once it has asked for them.
bool runs_amx() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

}  // namespace
#endif

#if defined(QKV_HAVE_NEON)
namespace {

// What -march=armv8.2-a+dotprod+fp16 lets the compiler use. Every Mac with such a processor has it.
bool runs_neon() {
#if defined(__APPLE__)
  return true;
#elif defined(__linux__)
  constexpr unsigned long needed = HWCAP_ASIMDDP | HWCAP_FPHP | HWCAP_ASIMDHP;
  return (getauxval(AT_HWCAP) & needed) == needed;
#else
  return false;
#endif
}

}  // namespace
#endif

const std::vector<const Kernels*>& kernel_sets() {
  static const std::vector<const Kernels*> sets = [] {
    std::vector<const Kernels*> found;
#if defined(QKV_HAVE_AMX)
    if (runs_avx512() && runs_amx()) found.push_back(&amx::TABLE);
#endif
#if defined(QKV_HAVE_AVX512)
    if (runs_avx512()) found.push_back(&avx512::TABLE);
#endif
#if defined(QKV_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      found.push_back(&avx2::TABLE);
#endif
#if defined(QKV_HAVE_NEON)
    if (runs_neon()) found.push_back(&neon::TABLE);
#endif
#if defined(QKV_HAVE_PORTABLE)
    found.push_back(&portable::TABLE);
#endif
    return found;
  }();
  return sets;
}

const Kernels& kernels(std::string_view name) {
  for (const auto* each : kernel_sets())
    if (name.empty() || name == each->name) return *each;
  throw std::invalid_argument("the instruction set " + std::string(name) + " was not built, or this processor lacks it");
}

}  // namespace qkv
