// The parts of the library that belong to no kernel: its version, and the processor that it was built for.
#include "quire_cpu.h"

extern "C" int32_t quire_abi_version(void) { return 21; }
