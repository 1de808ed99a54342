#include "attention_kernels.h"
namespace quire {
size_t tiles_scratch(const quire_cache&) { return 0; }
void attend_tiles(const Work& w, const Item& i, float* s) { attend_rows(w, i, s); }
}
