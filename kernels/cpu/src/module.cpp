// The Python module: picks an instruction set, runs ops on the pool without the GIL. Tensors come as addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bandwidth.h"
#include "exchange.h"
#include "expert_order.h"
#include "isa.h"
#include "pack.h"
#include "pool.h"
#include "program.h"

namespace nb = nanobind;

namespace {

constexpr int64_t SMALL = 1 << 15;  // an op that touches fewer numbers runs on the caller's thread: waking others costs more
constexpr int64_t PANEL = 32, BLOCK_BYTES = 2048, SPLIT = 256, TILE_TARGET = 64, INT8_DEPTH = 64, INT4_DEPTH = 128, K_DEPTH = 256, FLUSH_DEPTH = 128;  // of ops/tiles.h and ops/attention.h

const Kernels* active = nullptr;

template <typename T = void>
T* at(Address address) { return reinterpret_cast<T*>(address); }

const OpsOfType& ops(int dtype) {
  if (!active) throw std::runtime_error("no instruction set is in use; call use() first");
  return active->of(dtype);
}

template <typename Args>
void run(const Op<Args>& op, const Args& args, bool wide) {
  struct Call {
    const Op<Args>& op;
    const Args& args;
  } call{op, args};
  Pool::instance().run(
      [](const void* context, const Region& region) {
        const Call& c = *static_cast<const Call*>(context);
        c.op.run(c.args, region);
      },
      &call, op.scratch_bytes(args), wide);
}

// What the threads have seen of a row becomes what was found of it. A thread's columns ascend, so its ties do.
void join(Look& look, LookPart* parts, int num_parts, int64_t stride) {
  std::vector<int64_t> taken(num_parts, 0);
  look.is_broken = 0, look.num_found = 0, look.num_contenders = 0;
  double best = parts[0].gumbel.best;
  for (int i = 0; i < num_parts; ++i) {
    look.is_broken |= parts[i * stride].is_broken;
    if (parts[i * stride].gumbel.best > best) best = parts[i * stride].gumbel.best;
  }
  while (look.num_found < look.num_top) {
    const LookPart* first = nullptr;
    int from = 0;
    for (int i = 0; i < num_parts; ++i) {
      const LookPart& part = parts[i * stride];
      const int64_t at = taken[i];
      if (at == part.num_top) continue;
      const bool before = !first || part.values[at] > first->values[taken[from]] ||
                          (part.values[at] == first->values[taken[from]] && part.ids[at] < first->ids[taken[from]]);
      if (before) first = &part, from = i;
    }
    if (!first) break;
    look.top_ids[look.num_found] = first->ids[taken[from]];
    look.top_values[look.num_found++] = first->values[taken[from]++];
  }
  const double floor = best - GUMBEL_MARGIN - GUMBEL_ROUNDING * (best < 0 ? -best : best);
  for (int i = 0; i < num_parts; ++i) {
    const GumbelPart& part = parts[i * stride].gumbel;
    for (int64_t j = 0; j < part.count && look.num_contenders >= 0; ++j) {
      if (part.score[j] < floor) continue;
      look.num_contenders = look.num_contenders == GUMBEL_ROOM ? -1 : look.num_contenders + 1;
      if (look.num_contenders > 0) look.contenders[look.num_contenders - 1] = part.index[j];
    }
    if (part.count < 0) look.num_contenders = -1;
    if (look.num_contenders < 0) return;
  }
}

// In whole vectors of them.
int64_t panels_of(int64_t num_columns) { return (num_columns + 16 * PANEL - 1) / (16 * PANEL) * 16; }

// Asked of a linear op about its result, with room for what its threads see. Python makes one for each call.
struct Questions {
  Beside beside;
  std::vector<LookPart> parts;
  std::vector<float> powers;

  Questions(Address looks, int64_t num_looks, Address whole, int64_t num_whole, int64_t num_columns, int64_t panel_bytes)
      : beside{at<Look>(looks), num_looks, at<int64_t>(whole), num_whole,
               num_columns,     panel_bytes, nullptr, nullptr, panels_of(num_columns)} {
    refuse_to_record();
  }

  void make_room(int num_threads) {
    bool wants_total = false;
    for (int64_t i = 0; i < beside.num_looks; ++i) wants_total |= beside.looks[i].wants_total != 0;
    parts.resize(num_threads * beside.num_looks);
    if (wants_total) powers.resize(beside.num_looks * 2 * beside.num_panels);
    beside.parts = parts.data(), beside.powers = wants_total ? powers.data() : nullptr;
  }
};

template <typename Args>
const Op<LookedArgs<Args>>& looked();
template <>
const Op<LookedArgs<LinearArgs>>& looked() { return active->looked; }
template <>
const Op<LookedArgs<GroupedArgs>>& looked() { return active->looked_grouped; }

// A linear op, or the same with questions about its result.
template <typename Args>
void run_linear(const Op<Args>& op, const Args& args, bool wide, Questions* questions) {
  if (!questions) return run(op, args, wide);
  const int num_threads = wide ? Pool::instance().num_threads() : 1;
  questions->make_room(num_threads);
  Beside& beside = questions->beside;
  run(looked<Args>(), LookedArgs<Args>{&op, args, beside}, wide);
  if (beside.powers) run(active->totals, beside, beside.num_looks > 1);
  for (int64_t i = 0; i < beside.num_looks; ++i) join(beside.looks[i], beside.parts + i, num_threads, beside.num_looks);
}

std::vector<std::tuple<std::string, std::string, bool>> isas() {
  std::vector<std::tuple<std::string, std::string, bool>> all;
  for (const Isa& isa : built_isas()) all.emplace_back(isa.name, why_not(isa), isa.emulated);
  return all;
}

void use(const std::string& name) {
  for (const Isa& isa : built_isas()) {
    if (name != isa.name) continue;
    const std::string reason = why_not(isa);
    if (!reason.empty()) throw std::runtime_error(name + ": " + reason);
    active = isa.kernels;
    return;
  }
  throw std::runtime_error(name + " is not among the instruction sets this module was built for");
}

int64_t element_size(int dtype) { return dtype == BFLOAT16 ? 2 : 4; }

// The rows, `depth` long, what is beyond k zero.
void pad_rows(const char* x, int64_t x_stride, int64_t m, int64_t k, int64_t depth, int64_t size, char* padded) {
  for (int64_t row = 0; row < m; ++row) {
    std::memcpy(padded + row * depth * size, x + row * x_stride * size, k * size);
    std::memset(padded + (row * depth + k) * size, 0, (depth - k) * size);
  }
}

// ... in the pool's shared memory.
char* padded_rows(const char* x, int64_t x_stride, int64_t m, int64_t k, int64_t depth, int64_t size) {
  char* padded = Pool::instance().shared(m * depth * size);
  pad_rows(x, x_stride, m, k, depth, size, padded);
  return padded;
}

void linear(int dtype, Address x, int64_t x_stride, Address weight, Address bias, Address residual, int64_t residual_stride,
            Address out, int64_t out_stride, int64_t m, int64_t n_out, int64_t k, int activation, bool float32_out, Address questions) {
  std::lock_guard<std::recursive_mutex> hold(Pool::instance().mutex());
  const int64_t size = element_size(dtype), depth = (k * size + 63) / 64 * 64 / size;
  if (k != depth) {
    x = reinterpret_cast<Address>(padded_rows(at<char>(x), x_stride, m, k, depth, size));
    x_stride = depth;
  }
  const LinearArgs args{at(x),    at<char>(weight), at<float>(bias), at(residual),    at(out),    m,          n_out,
                        k,        x_stride,         residual_stride, out_stride,      activation, float32_out, nullptr,
                        nullptr,  nullptr};
  run_linear(ops(dtype).linear, args, m * n_out * k >= SMALL, at<Questions>(questions));
}

int64_t block_depth(int numbers) { return numbers == INT8 || numbers == FP8 ? INT8_DEPTH : INT4_DEPTH; }

// Bytes of the scales of a panel that is `depth` deep.
int64_t scale_panel_bytes(int form, int64_t num_groups, int64_t depth) {
  switch (form) {
    case FLOAT32_SCALES: return num_groups * PANEL * 4;
    case FLOAT16_SCALES: return num_groups * PANEL * 2;
    case K_MIN_SCALES: return depth / K_DEPTH * K_MIN_BYTES;
    case K_SCALES: return depth / K_DEPTH * K_BYTES;
  }
  return 0;
}

// x in fixed point (ops/fixed.h), in the pool's shared memory, times the weight.
void fixed_linear(int dtype, GroupedArgs args, int64_t depth, bool wide, Questions* questions) {
  const LinearArgs& a = args.linear;
  const int64_t block = block_depth(args.numbers), num_blocks = depth / block;
  args.flush = args.group < block ? args.group : block;
  args.scale_panel_bytes = scale_panel_bytes(args.scale_form, args.num_groups, depth);
  const int64_t x_bytes = a.m * depth * 2, scale_bytes = a.m * num_blocks * 4, sum_bytes = a.m * (depth / args.flush) * 4;
  char* shared = Pool::instance().shared(x_bytes + scale_bytes + 2 * sum_bytes);
  int16_t* fixed = reinterpret_cast<int16_t*>(shared);
  float* scales = reinterpret_cast<float*>(shared + x_bytes);
  int32_t* starts = reinterpret_cast<int32_t*>(shared + x_bytes + scale_bytes);
  float* sums = reinterpret_cast<float*>(shared + x_bytes + scale_bytes + sum_bytes);
  const FixedRowsArgs rows{a.x, fixed, scales, starts, sums, args.numbers, a.m, a.k, a.x_stride, depth, args.flush};
  run(ops(dtype).fixed_rows, rows, a.m > 1 && a.m * a.k >= SMALL);
  args.fixed = fixed, args.fixed_scales = scales, args.fixed_starts = starts, args.fixed_sums = sums;
  run_linear(ops(dtype).linear_fixed, args, wide, questions);
}

// x in the order of tiles (ops/linear_tiles.h), in the pool's shared memory, times the weight.
void tiled_linear(int dtype, GroupedArgs args, int64_t depth, bool wide, Questions* questions) {
  const LinearArgs& a = args.linear;
  args.flush = args.group < FLUSH_DEPTH ? args.group : FLUSH_DEPTH;
  args.scale_panel_bytes = scale_panel_bytes(args.scale_form, args.num_groups, depth);
  const bool sums = args.offsets || args.scale_form == K_MIN_SCALES;
  const int64_t rows = (a.m + 15) / 16 * 16, num_flushes = (depth + args.flush - 1) / args.flush, x_bytes = rows * depth * 2;
  char* shared = Pool::instance().shared(x_bytes + (sums ? rows * num_flushes * (int64_t)sizeof(float) : 0));
  uint16_t* tiles = reinterpret_cast<uint16_t*>(shared);
  float* x_sums = sums ? reinterpret_cast<float*>(shared + x_bytes) : nullptr;
  const TileRowsArgs order{a.x, tiles, x_sums, args.numbers, a.m, a.k, a.x_stride, depth, args.flush};
  run(ops(dtype).tile_rows, order, a.m > 1 && a.m * a.k >= SMALL);
  args.tiles = tiles, args.x_sums = x_sums;
  run_linear(ops(dtype).linear_tiles, args, wide, questions);
}

// `integers`: x is quantized too, row by row.
void linear_int8(int dtype, Address x, int64_t x_stride, Address weight, Address scales, Address bias, Address residual,
                 int64_t residual_stride, Address out, int64_t out_stride, int64_t m, int64_t n_out, int64_t k,
                 int activation, bool float32_out, bool integers, Address questions) {
  std::lock_guard<std::recursive_mutex> hold(Pool::instance().mutex());
  const bool wide = m * n_out * k >= SMALL;
  LinearArgs args{at(x), at<char>(weight), at<float>(bias), at(residual), at(out),    m,           n_out,
                  k,     x_stride,         residual_stride, out_stride,   activation, float32_out, at<float>(scales),
                  nullptr, nullptr};
  const int64_t depth = (k + INT8_DEPTH - 1) / INT8_DEPTH * INT8_DEPTH;
  if (integers) {
    const int64_t stride = depth % 1024 ? depth : depth + 64;  // kernels/cpu/spaced_rows.py has the reason
    char* rows = Pool::instance().shared(m * stride + 2 * m * (int64_t)sizeof(float));
    float* row_scales = reinterpret_cast<float*>(rows + m * stride);
    int32_t* row_sums = reinterpret_cast<int32_t*>(row_scales + m);
    run(ops(dtype).quantize, QuantizeArgs{at(x), rows, row_scales, row_sums, m, k, x_stride, stride}, m > 1 && m * k >= SMALL);
    args.x = rows, args.x_stride = stride, args.x_scales = row_scales, args.x_sums = row_sums;
    run_linear(ops(dtype).linear_w8a8, args, wide, at<Questions>(questions));
    return;
  }
  if (ops(dtype).fixed_numbers >> INT8 & 1) {
    GroupedArgs grouped{};
    grouped.linear = args, grouped.numbers = INT8, grouped.scale_form = ONE, grouped.group = INT8_DEPTH;
    fixed_linear(dtype, grouped, depth, wide, at<Questions>(questions));
    return;
  }
  if (k != depth) {
    args.x = padded_rows(at<char>(x), x_stride, m, k, depth, element_size(dtype));
    args.x_stride = depth;
  }
  run_linear(ops(dtype).linear_int8, args, wide, at<Questions>(questions));
}

// A weight with scales for each `group` of k, all groups covering whole blocks; `offsets`: 0 or as many.
void linear_grouped(int dtype, int numbers, Address x, int64_t x_stride, Address weight, int scale_form, Address scales,
                    Address offsets, int64_t group, Address bias, Address residual, int64_t residual_stride, Address out, int64_t out_stride,
                    int64_t m, int64_t n_out, int64_t k, int activation, bool float32_out, Address questions) {
  std::lock_guard<std::recursive_mutex> hold(Pool::instance().mutex());
  const int64_t block = block_depth(numbers), depth = (k + block - 1) / block * block;
  const int64_t num_groups = (depth + group - 1) / group, size = element_size(dtype);
  LinearArgs linear{at(x), at<char>(weight), at<float>(bias), at(residual), at(out),    m,           n_out,
                    k,     x_stride,         residual_stride, out_stride,   activation, float32_out, nullptr,
                    nullptr, nullptr};
  GroupedArgs args{};
  args.linear = linear, args.numbers = numbers, args.group = group, args.num_groups = num_groups;
  args.scale_form = scale_form, args.scales = at(scales), args.offsets = at<float>(offsets);
  args.scale_panel_bytes = scale_panel_bytes(scale_form, num_groups, depth);
  const bool wide = m * n_out * k >= SMALL;
  if (ops(dtype).tile_numbers >> numbers & 1) {
    tiled_linear(dtype, args, depth, wide, at<Questions>(questions));
    return;
  }
  if (ops(dtype).fixed_numbers >> numbers & 1) {
    fixed_linear(dtype, args, depth, wide, at<Questions>(questions));
    return;
  }
  // Padded rows and sums share the pool's shared memory: asking for it twice would give the same.
  const int64_t row_bytes = k == depth ? 0 : m * depth * size, sum_bytes = offsets ? m * num_groups * (int64_t)sizeof(float) : 0;
  char* shared = Pool::instance().shared(row_bytes + sum_bytes);
  float* sums = reinterpret_cast<float*>(shared + row_bytes);
  if (offsets) {
    run(ops(dtype).group_sums, GroupSumsArgs{at(x), sums, m, k, x_stride, group, num_groups}, m > 1 && m * k >= SMALL);
    args.x_sums = sums;
  }
  if (row_bytes) {
    pad_rows(at<char>(x), x_stride, m, k, depth, size, shared);
    args.linear.x = shared, args.linear.x_stride = depth;
  }
  run_linear(ops(dtype).linear_grouped, args, wide, at<Questions>(questions));
}

void attention(int dtype, Address q, int64_t q_stride, Address k_cache, int64_t k_block_stride, int64_t k_head_stride,
               Address v_cache, int64_t v_block_stride, int64_t v_head_stride, Address out, int64_t out_stride,
               Address block_tables, int64_t table_stride, Address cu_seqlens, Address kv_lens, int64_t num_sequences,
               int64_t num_kv_heads, int64_t group_size, int64_t head_dim, int64_t block_size, int cells, int64_t window,
               float scale, float cap) {
  std::lock_guard<std::recursive_mutex> hold(Pool::instance().mutex());
  AttentionArgs args{at(q),      at(k_cache),  at(v_cache),    at(out),        at<int64_t>(block_tables), at<int64_t>(cu_seqlens),
                     at<int64_t>(kv_lens),     num_sequences,  table_stride,   num_kv_heads,              group_size,
                     head_dim,   block_size,   q_stride,       out_stride,     k_block_stride,            k_head_stride,
                     v_block_stride,           v_head_stride,  cells,          window,                    scale,
                     cap,        nullptr};
  const int64_t tokens_per_tile = group_size < TILE_TARGET ? TILE_TARGET / group_size : 1;
  int64_t num_tiles = 0, longest = 0, visible = 0;
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t length = args.cu_seqlens[s + 1] - args.cu_seqlens[s];
    num_tiles += (length + tokens_per_tile - 1) / tokens_per_tile * num_kv_heads;
    longest = length > longest ? length : longest;
    const int64_t kv = window && window < args.kv_lens[s] ? window : args.kv_lens[s];
    visible += kv * length;
  }
  const int64_t splits_per_tile = table_stride * block_size / SPLIT + 1, threads = Pool::instance().num_threads();
  const bool wide = visible * num_kv_heads * group_size * head_dim >= SMALL;
  if (wide && threads > 1 && splits_per_tile > 1 && num_tiles < 4 * threads) {
    // Too few tiles to keep the threads busy: the splits of each are computed apart and merged afterwards, to the same bits.
    const int64_t rows = ((longest < tokens_per_tile ? longest : tokens_per_tile) * group_size + 31) / 32 * 32;
    const int64_t width = (head_dim + PANEL - 1) / PANEL * PANEL;
    const int64_t bytes = (rows * (width + 2) * 4 + 63) / 64 * 64;
    args.partials = Pool::instance().shared(num_tiles * splits_per_tile * bytes);
    run(ops(dtype).attention, args, true);
    run(ops(dtype).attention_merge, args, num_tiles > 1);
    return;
  }
  run(ops(dtype).attention, args, wide);
}

void rms_norm(int dtype, Address x, int64_t x_stride, Address residual, Address weight, Address out, int64_t out_stride,
              Address total, int64_t num_rows, int64_t size, float eps, bool unit_offset) {
  const NormArgs args{at(x),    at(residual), at(weight), at(out),    at(total), num_rows,
                      size,     x_stride,     out_stride, eps,        unit_offset};
  run(ops(dtype).norm, args, num_rows * size >= SMALL);
}

void rope(int dtype, Address q, int64_t q_stride, Address k, int64_t k_stride, Address q_out, int64_t q_out_stride, Address k_out,
          int64_t k_out_stride, Address cos, Address sin, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
          int64_t head_dim) {
  RopeArgs args{};
  args.q = at(q), args.k = at(k), args.q_out = at(q_out), args.k_out = at(k_out);
  args.q_stride = q_stride, args.k_stride = k_stride, args.q_out_stride = q_out_stride, args.k_out_stride = k_out_stride;
  args.cos = at<float>(cos), args.sin = at<float>(sin);
  args.num_tokens = num_tokens, args.num_heads = num_heads, args.num_kv_heads = num_kv_heads, args.head_dim = head_dim;
  run(ops(dtype).rope, args, num_tokens * (num_heads + num_kv_heads) * head_dim >= SMALL);
}

void rope_and_store(int dtype, Address q, int64_t q_stride, Address k, int64_t k_stride, Address v, int64_t v_stride,
                    Address q_out, int64_t q_out_stride, Address cos, Address sin, Address q_norm, Address k_norm, float eps,
                    bool unit_offset, Address k_cache, int64_t k_block_stride, int64_t k_head_stride, Address v_cache,
                    int64_t v_block_stride, int64_t v_head_stride, Address slot_blocks, Address slot_offsets,
                    int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int cells,
                    int64_t block_size) {
  RopeArgs args{};
  args.cells = cells, args.block_size = block_size;
  args.q = at(q), args.k = at(k), args.v = at(v), args.q_out = at(q_out);
  args.q_stride = q_stride, args.k_stride = k_stride, args.v_stride = v_stride, args.q_out_stride = q_out_stride;
  args.cos = at<float>(cos), args.sin = at<float>(sin);
  args.q_norm = at(q_norm), args.k_norm = at(k_norm), args.eps = eps, args.unit_offset = unit_offset;
  args.k_cache = at(k_cache), args.k_block_stride = k_block_stride, args.k_head_stride = k_head_stride;
  args.v_cache = at(v_cache), args.v_block_stride = v_block_stride, args.v_head_stride = v_head_stride;
  args.slot_blocks = at<int64_t>(slot_blocks), args.slot_offsets = at<int64_t>(slot_offsets);
  args.num_tokens = num_tokens, args.num_heads = num_heads, args.num_kv_heads = num_kv_heads, args.head_dim = head_dim;
  run(ops(dtype).rope, args, num_tokens * (num_heads + num_kv_heads) * head_dim >= SMALL);
}

void gated(int dtype, Address gate, int64_t gate_stride, Address up, int64_t up_stride, Address out, int64_t out_stride,
           int64_t num_rows, int64_t size, int activation) {
  const GatedArgs args{at(gate), at(up), at(out), num_rows, size, gate_stride, up_stride, out_stride, activation};
  run(ops(dtype).gated, args, num_rows * size >= SMALL);
}

void add(int dtype, Address x, int64_t x_stride, Address y, int64_t y_stride, Address out, int64_t num_rows, int64_t size) {
  const AddArgs args{at(x), at(y), at(out), num_rows, size, x_stride, y_stride};
  run(ops(dtype).add, args, num_rows > 1 && num_rows * size >= SMALL);
}

void columns(int dtype, Address x, int64_t x_stride, Address order, Address out, int64_t num_rows, int64_t num_columns) {
  const ColumnsArgs args{at(x), at<int64_t>(order), at(out), num_rows, num_columns, x_stride};
  run(ops(dtype).columns, args, num_rows > 1 && num_rows * num_columns >= SMALL);
}

void check_ids(Address ids, int64_t num_tokens, int64_t vocab_size) {
  for (int64_t i = 0; i < num_tokens; ++i)
    if (const int64_t id = at<int64_t>(ids)[i]; id < 0 || id >= vocab_size)
      throw std::out_of_range("token ids must be from 0 to " + std::to_string(vocab_size - 1));
}

// `scales`: of int8 rows, else 0.
void embedding(int dtype, Address ids, Address weight, Address scales, Address out, int64_t num_tokens, int64_t k,
               float scale, int64_t vocab_size) {
  check_ids(ids, num_tokens, vocab_size);
  const EmbeddingArgs args{at<int64_t>(ids), at<char>(weight), at(out), num_tokens, k, scale, at<float>(scales)};
  run(scales ? ops(dtype).embedding_int8 : ops(dtype).embedding, args, num_tokens * k >= SMALL);
}

void embedding_grouped(int dtype, int numbers, Address ids, Address weight, int scale_form, Address scales, Address offsets,
                       int64_t group, Address out, int64_t num_tokens, int64_t k, float scale, int64_t vocab_size) {
  check_ids(ids, num_tokens, vocab_size);
  const int64_t block = block_depth(numbers), depth = (k + block - 1) / block * block, groups = (depth + group - 1) / group;
  const EmbeddingArgs embedding{at<int64_t>(ids), at<char>(weight), at(out), num_tokens, k, scale, nullptr};
  const GroupedEmbeddingArgs args{embedding,  numbers,           group, groups, scale_form,
                                  at(scales), at<float>(offsets), scale_panel_bytes(scale_form, groups, depth)};
  run(ops(dtype).embedding_grouped, args, num_tokens * k >= SMALL);
}

void gated_strips(int dtype, Address both, int64_t both_stride, Address out, int64_t out_stride, int64_t num_rows, int64_t size,
                  int activation) {
  const GatedStripsArgs args{at<float>(both), at(out), num_rows, size, both_stride, out_stride, activation};
  run(ops(dtype).gated_strips, args, num_rows * size >= SMALL);
}

void lora(int dtype, Address x, int64_t x_stride, Address y, int64_t y_stride, bool float32_y, bool strips, Address a, Address b,
          Address ranks, Address widths, int64_t num_parts, int64_t max_rank, int64_t k, int64_t b_width, Address rows,
          Address blocks, int64_t num_blocks, int64_t num_rows) {
  const LoraArgs args{at(x),      at(y),     at(a),    at(b), at<int64_t>(ranks), at<int64_t>(widths), at<int64_t>(rows), at<int64_t>(blocks),
                      num_blocks, num_parts, max_rank, k,     b_width,            x_stride,            y_stride,          float32_y,
                      strips};
  run(ops(dtype).lora, args, num_blocks > 1 && num_rows * (k * num_parts + b_width) >= SMALL / 8);
}

// `products`: for each x, x_stride, weight, bias, out, out_stride, m, n_out, k (whole tiles deep).
void linear_each(int dtype, const std::vector<std::vector<int64_t>>& products, int activation) {
  std::lock_guard<std::recursive_mutex> hold(Pool::instance().mutex());
  std::vector<LinearArgs> each;
  int64_t work = 0;
  for (const std::vector<int64_t>& p : products) {
    if (p.size() != 9) throw std::invalid_argument("a product is 9 numbers");
    each.push_back(LinearArgs{at(p[0]), at<char>(p[2]), at<float>(p[3]), nullptr, at(p[4]), p[6], p[7], p[8], p[1], 0, p[5],
                              activation, false, nullptr, nullptr, nullptr});
    work += p[6] * p[7] * p[8];
  }
  run(ops(dtype).linear_each, LinearEachArgs{each.data(), static_cast<int64_t>(each.size())}, work >= SMALL);
}

void combine(int dtype, Address results, Address weights, Address places, Address out, int64_t num_rows, int64_t top_k,
             int64_t size) {
  const CombineArgs args{at(results), at<float>(weights), at<int64_t>(places), at(out), num_rows, top_k, size};
  run(ops(dtype).combine, args, num_rows * top_k * size >= SMALL);
}

// `rows` and `places` as in expert_order.h; returns its spans.
std::vector<Span> route(Address logits, Address bias, Address experts, Address weights, Address rows, Address places,
                        int64_t num_rows, int64_t num_experts, int64_t top_k, int64_t num_groups, int64_t limit_groups,
                        int64_t limit_best, bool sigmoid, bool normalize, float scale) {
  if (!active) throw std::runtime_error("no instruction set is in use; call use() first");
  const RouteArgs args{at<float>(logits), at<float>(bias), at<int64_t>(experts), at<float>(weights), num_rows,
                       num_experts,       top_k,           num_groups,           limit_groups,       limit_best,
                       sigmoid,           normalize,       scale};
  run(active->route, args, num_rows * num_experts >= SMALL);
  return order_by_expert(args.experts, num_rows, top_k, num_experts, at<int64_t>(rows), at<int64_t>(places));
}

void row_looks(Address looks, int64_t num_looks, int64_t num_columns) {
  if (!active) throw std::runtime_error("no instruction set is in use; call use() first");
  std::vector<LookPart> parts(num_looks);
  const RowLooksArgs args{at<Look>(looks), num_looks, num_columns, panels_of(num_columns), parts.data()};
  run(active->row_looks, args, num_looks > 1 && num_looks * num_columns >= SMALL);
  for (int64_t i = 0; i < num_looks; ++i) join(args.looks[i], &parts[i], 1, 1);
}

void draws(Address all, int64_t num_draws) {
  if (!active) throw std::runtime_error("no instruction set is in use; call use() first");
  DrawsArgs args{at<Draw>(all), num_draws, 0};
  int64_t work = 0;
  for (int64_t i = 0; i < num_draws; ++i) {
    work += args.draws[i].count;
    if (args.draws[i].count > args.most) args.most = args.draws[i].count;
  }
  run(active->draws, args, num_draws > 1 && work >= SMALL);
}

void pack(Address rows, int64_t row_stride_bytes, int64_t row_bytes, int64_t num_rows, Address packed, int64_t depth_blocks,
          int64_t first_strip, int64_t strip_step, int64_t block_words) {
  pack_rows(at<char>(rows), row_stride_bytes, row_bytes, num_rows, at<char>(packed), depth_blocks, first_strip, strip_step,
            block_words);
}

}  // namespace

NB_MODULE(pagewire_kernels_cpu, m) {
  m.doc() = "pagewire's native CPU kernels; kernels.cpu wraps them.";
  m.attr("ABI") = 10;
  nb::set_leak_warnings(false);  // an engine may live until its process ends, and its exchange with it
  m.def("isas", &isas, "(name, reason it can't run here or \"\", emulated) of each instruction set built, best first");
  m.def("use", &use, "pick the instruction set that the ops run on");
  m.def("configure", [](int num_threads, std::vector<int> cpus, int64_t spin_ns) {
    if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
    Pool::instance().configure(num_threads, std::move(cpus), spin_ns);
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("num_threads", [] { return Pool::instance().num_threads(); });
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("read", [](Address buffer, int64_t num_bytes) { return read_all(at<char>(buffer), num_bytes); }, unlocked);
  m.def("pack", &pack, unlocked);
  m.def("linear", recorded<&linear, 9>(&linear), unlocked);
  m.def("linear_int8", recorded<&linear_int8, 10>(&linear_int8), unlocked);
  m.def("linear_grouped", recorded<&linear_grouped, 14>(&linear_grouped), unlocked);
  m.def("embedding_grouped", recorded<&embedding_grouped, 9, 2>(&embedding_grouped), unlocked);
  m.def("attention", recorded_over_sequences<&attention, 15, 11, 13, 14>(&attention), unlocked);
  m.def("rms_norm", recorded<&rms_norm, 8>(&rms_norm), unlocked);
  m.def("rope", recorded<&rope, 11, 9, 10>(&rope), unlocked);
  m.def("rope_and_store", recorded<&rope_and_store, 23, 9, 10, 21, 22>(&rope_and_store), unlocked);
  m.def("gated", recorded<&gated, 7>(&gated), unlocked);
  m.def("add", recorded<&add, 6>(&add), unlocked);
  m.def("columns", recorded<&columns, 5>(&columns), unlocked);
  m.def("embedding", recorded<&embedding, 5, 1>(&embedding), unlocked);
  m.def("gated_strips", unrecorded<&gated_strips>(&gated_strips), unlocked);
  m.def("lora", unrecorded<&lora>(&lora), unlocked);
  m.def("linear_each", unrecorded<&linear_each>(&linear_each), unlocked);
  m.def("combine", unrecorded<&combine>(&combine), unlocked);
  m.def("route", unrecorded<&route>(&route), unlocked);
  m.def("row_looks", unrecorded<&row_looks>(&row_looks), unlocked);
  m.def("draws", unrecorded<&draws>(&draws), unlocked);
  nb::exception<Unrecordable>(m, "Unrecordable");
  nb::class_<Program>(m, "Program", "a step's ops to run again, see program.h")
      .def(nb::init<int64_t, std::vector<Address>>())
      .def("begin", &Program::begin, "this thread's ops are noted from now on, and not run")
      .def("end", &Program::end)
      .def("__len__", &Program::size)
      .def("run", &Program::run, unlocked);
  m.attr("LOOK_BYTES") = sizeof(Look);
  m.attr("DRAW_BYTES") = sizeof(Draw);
  nb::class_<Questions>(m, "Questions", "about a linear op's result (ops/looks.h), handed to it by address")
      .def(nb::init<Address, int64_t, Address, int64_t, int64_t, int64_t>())
      .def_prop_ro("address", [](const Questions& self) { return reinterpret_cast<Address>(&self); });
  nb::class_<Exchange>(m, "Exchange", "parts of ranks in shared memory at an address, see exchange.h")
      .def("__init__", [](Exchange* self, Address memory, int64_t capacity, int rank, int size, int64_t spin_ns, int64_t timeout_ms) {
        new (self) Exchange(at(memory), capacity, rank, size, spin_ns, timeout_ms);
      })
      .def_static("bytes", &Exchange::bytes)
      .def("sum", [](Exchange& self, Address own, Address total, int64_t count) { refuse_to_record(); self.sum(at<float>(own), at<float>(total), count); },
           unlocked)
      .def("gather", [](Exchange& self, Address own, Address all, int64_t num_bytes) { refuse_to_record(); self.gather(at<char>(own), at<char>(all), num_bytes); },
           unlocked)
      .def("give_up", &Exchange::give_up, unlocked);
}
