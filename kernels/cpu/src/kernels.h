// The ops of one instruction set. Each op is a function that all threads of a region run, and a size of scratch.
#pragma once
#include "args.h"

template <typename Args>
struct Op {
  void (*run)(const Args&, const Region&);
  int64_t (*scratch_bytes)(const Args&);  // for each thread
};

// A linear op that looks at its result chunk by chunk (looks.h).
template <typename Args>
struct LookedArgs {
  const Op<Args>* linear;
  Args args;
  Beside beside;
};

struct OpsOfType {
  Op<LinearArgs> linear;
  Op<AttentionArgs> attention;        // whole tiles, or partial results of single splits if `partials` is set
  Op<AttentionArgs> attention_merge;  // the partial results in order
  Op<NormArgs> norm;
  Op<RopeArgs> rope;
  Op<GatedArgs> gated;
  Op<EmbeddingArgs> embedding;
  Op<GatedStripsArgs> gated_strips;
  Op<LoraArgs> lora;
  Op<LinearArgs> linear_int8;
  Op<LinearArgs> linear_w8a8;
  Op<QuantizeArgs> quantize;
  Op<EmbeddingArgs> embedding_int8;
  Op<GroupedArgs> linear_grouped;
  Op<GroupSumsArgs> group_sums;
  Op<GroupedEmbeddingArgs> embedding_grouped;
  Op<LinearEachArgs> linear_each;
  Op<CombineArgs> combine;
  Op<GroupedArgs> linear_fixed;
  Op<FixedRowsArgs> fixed_rows;
  Op<GroupedArgs> linear_tiles;
  Op<TileRowsArgs> tile_rows;
  Op<AddArgs> add;
  Op<ColumnsArgs> columns;
  uint32_t fixed_numbers;  // a bit for each kind of numbers that goes by linear_fixed
  uint32_t tile_numbers;   // ... by linear_tiles
};

// What VNNI computes, to the same bits as without it.
struct IntegerOps {
  Op<LinearArgs> linear_w8a8;
  Op<GroupedArgs> linear_fixed;
};

struct Kernels {
  OpsOfType float32;
  OpsOfType bfloat16;
  Op<LookedArgs<LinearArgs>> looked;
  Op<LookedArgs<GroupedArgs>> looked_grouped;
  Op<Beside> totals;
  Op<RowLooksArgs> row_looks;
  Op<DrawsArgs> draws;
  Op<RouteArgs> route;
  const OpsOfType& of(int dtype) const { return dtype == BFLOAT16 ? bfloat16 : float32; }
};

extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const IntegerOps integer_ops_vnni[2];  // of float32, of bfloat16
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_amx;
extern const Kernels kernels_amx_emulated;
