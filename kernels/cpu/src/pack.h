// Weights in tile order.
#pragma once
#include <cstdint>

// Copies rows of a weight W [num_rows, row_bytes] into its packed form, 16 rows to a strip: rows 16 g ... become strip
// first_strip + g * strip_step. The destination was all zeros; rows and depth beyond the weight's stay so.
//
//   packed = [panels][depth blocks][2 strips][16 words][16 rows] of 32-bit words,   panel = 32 rows = 2 strips
//
// A word is 1 float32, 2 bfloat16 or 4 int8 next to one another in a row of W; 16 words deep and 16 rows wide make a tile of
// 1 KB, which is one AMX tile, or 16 vectors of 512 bits. A panel is contiguous, and read front to back. `block_words`: 16, or
// 20 or 24 for numbers of 5 and 6 bits, of which a row brings the words in the order that fixed.h reads them.
void pack_rows(const char* rows, int64_t row_stride_bytes, int64_t row_bytes, int64_t num_rows, char* packed,
               int64_t depth_blocks, int64_t first_strip, int64_t strip_step, int64_t block_words);
