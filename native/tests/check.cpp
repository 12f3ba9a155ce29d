// native_check: the kernels of one instruction set, the threads and a whole program, without Python.
//
// QKV_ISA names the set; without it the best that this processor runs is taken, which must be the one
// that the argument names, if any. Ends with 0 where all is right, 1 where not, and 77 where the set
// cannot run here.
#include "check.h"

#include <cstdlib>
#include <stdexcept>

using namespace qkv;

int main(int count, char** arguments) {
  const char* named = std::getenv("QKV_ISA");
  const Kernels* set = nullptr;
  try {
    set = &kernels(named == nullptr ? "" : named);
  } catch (const std::invalid_argument& error) {
    std::printf("not checked: %s\n", error.what());
    return 77;
  }
  std::printf("%s\n", set->name);
  tests::Record record;
  if (count > 1) record.that(set->name == std::string_view(arguments[1]), "not the set to choose");
  const struct {
    const char* name;
    void (*check)(const Kernels&, tests::Record&);
  } parts[] = {{"linear", tests::check_linear}, {"read", tests::check_read},       {"finish", tests::check_finish},
               {"rows", tests::check_rows},     {"cache", tests::check_cache},     {"attend", tests::check_attend},
               {"workers", tests::check_workers}, {"program", tests::check_program}};
  for (const auto& part : parts) {
    const long compared = record.compared(), failed = record.failed();
    record.about(part.name);
    part.check(*set, record);
    std::printf("  %-8s %8ld compared, %ld wrong\n", part.name, record.compared() - compared, record.failed() - failed);
    // a part that compares nothing would pass whatever the kernels do
    record.that(record.compared() > compared, "nothing was compared");
  }
  return record.failed() == 0 ? 0 : 1;
}
