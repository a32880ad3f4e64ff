// What the Python side hands to an op: plain pointers, shapes and strides. Strides count elements unless they say bytes.
// Plain data only: this file is compiled for every instruction set, and a function here could end up in the wrong one.
#pragma once
#include <stdint.h>

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1 };
enum Numbers : int { INT4 = 0, INT8 = 1, FP8 = 2, UINT4 = 3, UINT5 = 4, INT5 = 5, INT6 = 6 };  // grouped.h, fixed.h
// Of a weight's groups, [panel][group][32 rows], or none; K_MIN_SCALES, K_SCALES: [panel][256 columns] of K_MIN_BYTES, K_BYTES
enum ScaleForm : int { FLOAT32_SCALES = 0, FLOAT16_SCALES = 1, K_MIN_SCALES = 2, K_SCALES = 3, ONE = 4 };
enum CellFormat : int { PLAIN = 0, INT8_CELLS = 1, FP8_CELLS = 2 };  // of a KV cache (kv_cells.h)
enum Activation : int { NO_ACTIVATION = 0, SILU_AND_MUL = 1, GELU_TANH_AND_MUL = 2 };

// One thread's view of a parallel region. `counter` starts at 0 and deals out the region's tasks.
struct Region {
  int thread;
  int num_threads;
  int64_t* counter;
  char* scratch;  // this thread's own, of the size the op asked for
};

// out = act(x Wᵀ + bias) + residual. x [m, k], weight packed (pack.h), bias float32 in the packed weight's order of columns,
// residual and out [m, n_out]. k is whole tiles deep: the caller pads x if need be.
struct LinearArgs {
  const void* x;
  const char* weight;
  const float* bias;     // null: none
  const void* residual;  // null: none
  void* out;
  int64_t m, n_out, k;  // with an activation the packed columns are gate and up by turns of 16
  int64_t x_stride, residual_stride, out_stride;
  int activation;
  bool float32_out;  // write float32 whatever x is (logits)
  const float* scales;    // int8 weights: of each packed column; null: the weight is of x's type
  const float* x_scales;  // x int8 too: of each row, null: x is of the result's type
  const int32_t* x_sums;  // ... and its sum
};

// `count` such products of one kind (linear_each.h); k is whole tiles deep in all of them.
struct LinearEachArgs {
  const LinearArgs* each;
  int64_t count;
};

// out[row] = the sum over top_k of weights[row, r] * results[places[row, r]] (combine.h). Rows of `size`, side by side.
struct CombineArgs {
  const void* results;
  const float* weights;   // [num_rows, top_k]
  const int64_t* places;  // the same
  void* out;
  int64_t num_rows, top_k, size;
};

// The top_k experts of each row and their weights (routing.h). logits [num_rows, num_experts]; experts and weights
// [num_rows, top_k].
struct RouteArgs {
  const float* logits;
  const float* bias;  // [num_experts], in the choice alone; null: none
  int64_t* experts;
  float* weights;
  int64_t num_rows, num_experts, top_k;
  int64_t num_groups, limit_groups, limit_best;  // only experts of the best groups; 0: of all
  bool sigmoid, normalize;                       // scores: else a softmax; weights divided by their sum
  float scale;                                   // then times this
};

// `linear` over a weight of 4 or 8 bit numbers with scales for each `group` of k (grouped.h).
struct GroupedArgs {
  LinearArgs linear;
  int numbers;
  int64_t group, num_groups;  // k in a group: 32, 64 or whole blocks; the groups cover whole blocks
  int scale_form;
  const void* scales;
  const float* offsets;       // [panels, groups, 32]; null: none
  const float* x_sums;        // [m, groups], of x over each group; only with offsets; of tile_rows as that orders them
  // Instead of x, when it goes in fixed point: as fixed_rows makes them.
  int64_t flush, scale_panel_bytes;  // k whose products are added as integers; scales of a panel
  const int16_t* fixed;
  const float* fixed_scales;
  const int32_t* fixed_starts;
  const float* fixed_sums;
  const uint16_t* tiles;  // ... or as tile_rows does
};

constexpr int64_t K_MIN_BYTES = 640;  // float16 d[32], dmin[32]; uint8 scale[8][32], min[8][32]: scale d, offset -dmin min
constexpr int64_t K_BYTES = 576;      // float16 d[32]; int8 scale[16][32]

// Rows in fixed point (fixed.h), `depth` long: out [blocks][num_rows][block], scales [blocks][num_rows], starts and sums
// [depth / flush][num_rows]: the sums of each flush, and times the number that those of the weight are short of.
struct FixedRowsArgs {
  const void* x;
  int16_t* out;
  float* scales;
  int32_t* starts;
  float* sums;
  int numbers;
  int64_t num_rows, size, x_stride, depth, flush;
};

// bfloat16 rows in the order of tiles (linear_tiles.h): out [16 rows][depth / 32][row][32 k], what is beyond `size` zero;
// sums [16 rows][flush][row], or null. Of the last rows a tile has room for 1, 2, 4, 8 or 16.
struct TileRowsArgs {
  const void* x;
  uint16_t* out;
  float* sums;
  int numbers;
  int64_t num_rows, size, x_stride, depth, flush;
};

// sums[row, g] = the sum of x over the k of group g.
struct GroupSumsArgs {
  const void* x;
  float* sums;
  int64_t num_rows, size, x_stride, group, num_groups;
};

// Rows of `size` to int8, each with a scale (int8.h). out_stride: whole blocks of 64.
struct QuantizeArgs {
  const void* x;
  char* out;
  float* scales;
  int32_t* sums;
  int64_t num_rows, size, x_stride, out_stride;
};

// out = softmax(q Kᵀ scale, capped) V over the pages of each sequence (attention.h).
struct AttentionArgs {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  void* out;
  const int64_t* block_tables;  // [sequences, table_stride]
  const int64_t* cu_seqlens;    // [sequences + 1]
  const int64_t* kv_lens;       // [sequences]
  int64_t num_sequences, table_stride;
  int64_t num_kv_heads, group_size, head_dim, block_size;
  int64_t q_stride, out_stride;                                 // from token to token; heads lie side by side
  int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;  // a head's tokens lie side by side
  int cells;       // a CellFormat; strides of the caches count its elements
  int64_t window;  // 0: everything before is visible
  float scale, cap;  // cap 0: none
  char* partials;  // room for the splits' partial results when they are computed apart, else null
};

// out = x / sqrt(mean(x²) + eps) * w (or 1 + w), x += residual first when there is one. Rows of `size`.
struct NormArgs {
  const void* x;
  const void* residual;  // null: none
  const void* weight;
  void* out;
  void* total;  // x + residual, when there is one
  int64_t num_rows, size;
  int64_t x_stride, out_stride;
  float eps;
  bool unit_offset;
};

// Norm q and k if weights are given, rotate both, store k and v in their slots; q goes to `q_out`, or stays for q_out null.
struct RopeArgs {
  const void* q;
  const void* k;
  const void* v;  // null: only rotate, k into k_out
  void* q_out;
  void* k_out;
  void* k_cache;
  void* v_cache;
  const float* cos;
  const float* sin;
  const void* q_norm;  // null: none
  const void* k_norm;
  const int64_t* slot_blocks;
  const int64_t* slot_offsets;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim;
  int64_t q_stride, k_stride, v_stride, q_out_stride, k_out_stride;  // from token to token
  int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
  int cells;           // a CellFormat
  int64_t block_size;  // of such cells
  float eps;
  bool unit_offset;
};

// out[i] = act(gate[i]) * up[i], rows of `size`.
struct GatedArgs {
  const void* gate;
  const void* up;
  void* out;
  int64_t num_rows, size;
  int64_t gate_stride, up_stride, out_stride;
  int activation;
};

// The same over float32 sums of a packed gate and up projection: 16 columns of gate, 16 of up, by turns.
struct GatedStripsArgs {
  const float* both;
  void* out;
  int64_t num_rows, size;
  int64_t both_stride, out_stride;
  int activation;
};

// y[row] += (x[row] Aᵀ) Bᵀ for each listed row (lora.h). a [slots, parts, max_rank, k], b [slots, max_rank, b_width]: the
// parts' columns side by side. Block i: rows[blocks[3i + 1] … blocks[3i + 2]) have the adapter in slot blocks[3i].
struct LoraArgs {
  const void* x;
  void* y;
  const void* a;
  const void* b;
  const int64_t* ranks;   // [slots, parts]; 0: the adapter leaves this part alone
  const int64_t* widths;  // [parts], columns
  const int64_t* rows;
  const int64_t* blocks;
  int64_t num_blocks, num_parts, max_rank, k, b_width;
  int64_t x_stride, y_stride;
  bool float32_y;  // y is float32 whatever x is
  bool strips;     // y has its parts in strips of 16 columns, by turns
};

// out = x + y, out's rows side by side.
struct AddArgs {
  const void* x;
  const void* y;
  void* out;
  int64_t num_rows, size;
  int64_t x_stride, y_stride;
};

// out[row, i] = x[row, order[i]], out's rows side by side.
struct ColumnsArgs {
  const void* x;
  const int64_t* order;
  void* out;
  int64_t num_rows, num_columns;
  int64_t x_stride;
};

// Rows of a packed weight, times `scale`. ids [num_tokens] -> out [num_tokens, k].
struct EmbeddingArgs {
  const int64_t* ids;
  const char* weight;
  void* out;
  int64_t num_tokens, k;
  float scale;          // 1: as they are
  const float* scales;  // int8 weights: of each row
};

// Rows of a grouped weight, times `scale`.
struct GroupedEmbeddingArgs {
  EmbeddingArgs embedding;
  int numbers;
  int64_t group, num_groups;
  int scale_form;
  const void* scales;
  const float* offsets;
  int64_t scale_panel_bytes;
};

// What the noise of a position depends on besides the token, as in engine/philox.py.
struct GumbelKey {
  uint64_t seed;
  uint32_t position, choice, domain;
};

// Candidates so far: the best score, and who is near it (index, score).
constexpr int64_t GUMBEL_ROOM = 256;
constexpr double GUMBEL_MARGIN = 1e-4;     // how near, in nats
constexpr double GUMBEL_ROUNDING = 1e-15;  // and of the best score: float64's own rounding
struct GumbelPart {
  double best;
  int64_t count;  // -1: more than there is room for
  int64_t index[GUMBEL_ROOM];
  double score[GUMBEL_ROOM];
};

// What is asked about a row of logits and what was found (looks.h). kernels/cpu/looks.py has the same fields.
constexpr int64_t MOST_TOP = 128;
struct Look {
  const float* logits;  // null: row `row` of those being made
  int64_t row;
  int64_t num_top;      // how many of the likeliest, 1 ... MOST_TOP
  int64_t token;        // whose rank is wanted, -1: none. Of whole rows only
  double temperature;   // 0: nothing is drawn
  GumbelKey key;
  int32_t wants_total;  // log-sum-exp
  int32_t is_broken;    // found: there is a NaN
  int64_t num_found, num_contenders, rank;
  double log_total;
  int64_t top_ids[MOST_TOP];        // the likeliest first; of equals the lowest id
  float top_values[MOST_TOP];
  int64_t contenders[GUMBEL_ROOM];  // who may win the draw; num_contenders -1: more than there is room for
};

// What one thread has seen of a row, or all there is to see.
struct LookPart {
  bool is_broken;
  float floor;  // what exceeds it is among the likeliest
  int64_t num_top;
  int64_t ids[MOST_TOP];
  float values[MOST_TOP];
  GumbelPart gumbel;
};

// For each 32 columns of a row the largest logit, and the sum of e^(logit - it).
struct Powers {
  float* largest;
  float* sums;
};

// Looks at the logits while they are made; only rows listed in `whole` are written.
struct Beside {
  Look* looks;
  int64_t num_looks;
  const int64_t* whole;
  int64_t num_whole;
  int64_t num_columns;  // what lies beyond is padding of the weight
  int64_t panel_bytes;  // of the weight
  LookPart* parts;      // [threads, looks]
  float* powers;        // [looks, 2, panels]; with none that wants a total not there
  int64_t num_panels;   // a multiple of 16
};

// Looks at whole rows of num_columns.
struct RowLooksArgs {
  Look* looks;
  int64_t num_looks, num_columns, num_panels;
  LookPart* parts;  // [looks]
};

// Draws from whole rows, filtered by min-p, top-k and top-p (draws.h). kernels/cpu/draws.py has the same fields.
struct Draw {
  const float* logits;
  const int64_t* ids;   // of the candidates, ascending; null: 0, 1, 2 ...
  const float* powers;  // e^((logit - the largest) / T) if the caller has them, good to `margin`; else null
  int64_t count, top_k;
  double temperature;   // 0: only the likeliest is wanted
  double depth;         // T ln(min_p); -inf: none
  double top_p, margin;
  GumbelKey key;
  int32_t state;        // found: DRAWN, NOT_FINITE or UNSURE
  int64_t likeliest, num_contenders;
  int64_t contenders[GUMBEL_ROOM];  // indexes
};
enum DrawState : int { DRAWN = 0, NOT_FINITE = 1, UNSURE = 2 };
struct DrawsArgs {
  Draw* draws;
  int64_t num_draws, most;  // candidates of a draw
};
