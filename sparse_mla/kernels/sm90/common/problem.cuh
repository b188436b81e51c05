// What a prefill kernel is asked to compute, as `backends/sm90.py` packs it, and the numbers every kernel shares.
#pragma once

#include "ptx.cuh"

struct PrefillParams {
  const u8* q;               // e4m3 [s_q, h_q, D_QK], strides below
  const u8* kv;              // e4m3 [s_kv, D_QK], 16-byte aligned rows
  const int* indices;        // [s_q, topk]
  const float* q_scale;      // one element, [s_q] or [s_q, h_q], strides below
  const float* kv_scale;     // one element, or [s_kv] in a kernel compiled for it
  const float* attn_sink;    // [h_q] or null
  const int* topk_length;    // [s_q] or null
  u32* out;                  // bfloat16 pairs [s_q, out_heads, 512]
  float* max_logits;         // [s_q, out_heads]
  float* lse;                // [s_q, out_heads]
  i64 q_stride_token;        // bytes
  i64 q_stride_head;         // bytes
  i64 kv_stride;             // bytes
  i64 indices_stride;        // elements
  int s_q, s_kv, h_q, topk;  // h_q: heads of this launch; every pointer above is at the first of them
  float sm_scale;
  int q_scale_stride_token;  // elements; 0 where all tokens share a scale
  int q_scale_stride_head;   // elements; 0 where all heads do
  int out_heads;             // heads of the outputs: elements from a token's max_logits to the next's
  int ctas_per_item;         // CTAs of the launch's clusters, which share the slots of an item; few heads only
};

constexpr int kDv = 512;

// A block of K in shared memory, a stage: the latent columns in tiles of 128, then the rope columns in one of 64.
constexpr int kBlock = 64;         // slots
constexpr int kLatentTile = 8192;  // 64 rows x 128 columns, 128-byte swizzle
constexpr int kLatentTiles = kDv / 128;
constexpr int kRopeTile = D_QK > kDv ? 4096 : 0;   // 64 rows x 64 columns, 64-byte swizzle
constexpr int kRope = kLatentTiles * kLatentTile;  // offset of the rope tile in a stage
constexpr int kStageBytes = kRope + kRopeTile;

// The reference of the exponent sits kHeadroom below the running maximum: P lies in (0, 256] and the largest of a row is
// 256, which e4m3 holds exactly. Probabilities down to 2^-14 of it are normal numbers, down to 2^-17 subnormal ones.
constexpr float kHeadroom = 8.f;
constexpr float kLowest = -1e30f;  // a reference below every logit; finite, so that -inf - kLowest is -inf
constexpr float kBad = 1e-44f;  // in the place of c where a scale is not finite and positive: the row becomes NaN
constexpr float kLeastC = 2e-44f;  // were c 0, the -inf of a masked slot would become NaN. Above kBad, to be told from it
static_assert(0.f < kBad && kBad < kLeastC);
constexpr float kLeastPower = 0x1p-100f;  // the least KV scale in P and its inverse: by smaller ones the denominator overflows
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Slots of a query that may be valid: all, or topk_length clamped to [0, topk].
DEVICE int length_of(const PrefillParams& params, int token) {
  if (params.topk_length == nullptr) return params.topk;
  return max(0, min(params.topk, __ldg(params.topk_length + token)));
}

DEVICE bool is_scale(float x) { return x > 0.f && x < kInfinity; }

// What turns sums of QK into logits in units of log2. A product that is too small for float32 gives logits of nothing.
DEVICE float to_c(const PrefillParams& params, float q_scale, float kv_scale) {
  const float c = params.sm_scale * q_scale * kv_scale * kLog2e;
  return is_scale(q_scale) && is_scale(kv_scale) ? fmaxf(c, kLeastC) : kBad;
}

// A position in a ring of buffers, and the parity of its use.
template <int size>
struct Ring {
  u32 slot = 0, parity = 0;
  DEVICE void next() {
    if (++slot == size) {
      slot = 0;
      parity ^= 1;
    }
  }
};
