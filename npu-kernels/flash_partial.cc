// The functions that a core's program calls, each for one object. HEAD_DIM is 128 or 256. Build them with build.sh, or for the host with
//   g++ -std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -shared -fPIC -Ihost -DHEAD_DIM=128 flash_partial.cc
#include "flash_partial.h"

#ifndef HEAD_DIM
#error "give -DHEAD_DIM=128 or -DHEAD_DIM=256"
#endif

extern "C" {

// Bytes of `state`, which design.py must allocate.
extern const uint32_t flash_state_bytes;
const uint32_t flash_state_bytes = sizeof(flash::State<HEAD_DIM>);

extern const uint32_t flash_head_dim;
const uint32_t flash_head_dim = HEAD_DIM;

// Reads the header object. Sets tiles[0] to the number of tiles that follow the queries.
void flash_begin(const uint32_t *header, uint8_t *state, int32_t *tiles) {
    auto &s = *reinterpret_cast<flash::State<HEAD_DIM> *>(state);
    flash::begin(header, s);
    tiles[0] = int32_t(s.tiles);
}

void flash_query(const bfloat16 *queries, uint8_t *state, float *out) {
    flash::query(queries, *reinterpret_cast<flash::State<HEAD_DIM> *>(state), out);
}

void flash_tile(const bfloat16 *object, uint8_t *state, float *out) {
    flash::tile(object, *reinterpret_cast<flash::State<HEAD_DIM> *>(state), out);
}

void flash_end(uint8_t *state, float *out) {
    flash::end(*reinterpret_cast<flash::State<HEAD_DIM> *>(state), out);
}
}
