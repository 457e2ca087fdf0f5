// AMX's tile instructions for processors without them, as Intel's manual describes them.

#include <stdint.h>
#include <string.h>

static _Thread_local float tile_numbers[8][16][16];

static inline float tile_half(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

#define TILE_SHAPES(shapes) memset(tile_numbers, 0x7F, sizeof tile_numbers)
#define TILE_LOAD(tile, at, bytes)    \
    for (int i_ = 0; i_ < 16; i_++)   \
        memcpy(tile_numbers[tile][i_], (const char *)(at) + i_ * (bytes), 64)
#define TILE_STORE(tile, at, bytes)   \
    for (int i_ = 0; i_ < 16; i_++)   \
        memcpy((char *)(at) + i_ * (bytes), tile_numbers[tile][i_], 64)
#define TILE_ZERO(tile) memset(tile_numbers[tile], 0, sizeof tile_numbers[tile])
#define TILE_MULTIPLY(sum, a, b)                                                                 \
    for (int i_ = 0; i_ < 16; i_++)                                                              \
        for (int t_ = 0; t_ < 16; t_++)                                                          \
            for (int j_ = 0; j_ < 16; j_++) {                                                    \
                uint32_t x_, y_;                                                                 \
                memcpy(&x_, &tile_numbers[a][i_][t_], 4), memcpy(&y_, &tile_numbers[b][t_][j_], 4); \
                tile_numbers[sum][i_][j_] += tile_half(x_ << 16) * tile_half(y_ << 16) +         \
                                             tile_half(x_ & 0xFFFF0000u) *                      \
                                                 tile_half(y_ & 0xFFFF0000u);                    \
            }
