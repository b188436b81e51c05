// FP8 sparse MLA prefill on Hopper for few heads: 8, 16, 24 or 32 a CTA (-D HEADS), and for few queries, whose slots are
// split over the CTAs of a cluster. Also -D D_QK=512 or 576 and -D KV_SCALES=0 or 1; `backends/sm90.py` launches it.
//
//   for a query token t and HEADS of its heads:
//     S[j, h]  = sum_d K[j, d] Q[h, d]                 K[j] = kv[indices[t, j]], zeros where the slot is invalid
//     P[j, h]  = 2^(c S[j, h] - ref[h])                c = sm_scale q_scale kv_scale log2(e)
//     O[d, h]  = sum_j V[j, d] P[j, h] / sum_j P[j, h] V = the first 512 columns of K
//
// With a scale for each KV token (KV_SCALES), k[j] below: c is without it, P[j, h] = k[j] 2^(c k[j] S[j, h] - ref[h]), and
// the denominator sums P[j, h] / k[j].
//
// Why this shape of kernel. A row of 576 bytes serves 2 x HEADS x 1,088 operations: with 16 heads the tensor cores need a third of
// the time that the rows take to arrive, and what counts is the gather and the bandwidth of shared memory, through which
// every row goes three times: in, to S and to O. Heads are the N of both products, S^T = K Q^T and O^T = V^T P^T, so the
// tensor cores work on at most the next multiple of 8 of them. O^T of 32 heads is 128 registers a thread: each of two
// warpgroups keeps a whole one of its own, with its own maxima, takes every other block of 64 slots, and meets the other
// only at the end of a query token, as two parts of a split do.
//
//   producer    gathers K[b+2], K[b+3], ...  by 16-byte cp.async into a ring of stages
//   attend 0    S[b] = K[b] Q^T   | softmax of S[b] | O^T = O^T factor + V[b]^T P[b]^T |  b+2 ...
//   attend 1              S[b+1]  | softmax         | O^T += V[b+1]^T P[b+1]^T         |  b+3 ...
//
// Time is left over, and buys accuracy: FP8 wgmma keeps some 14 bits of whatever it sums, so S is summed in three parts
// and each block's O in one, which are added in float32.
#pragma once

#include "common/problem.cuh"
#include "common/wgmma_narrow.cuh"

constexpr int kHeads = HEADS;  // N of both products
constexpr bool kKvScales = KV_SCALES;
constexpr int kStages = 5;
constexpr int kGroups = kHeads / 8;  // of 8 heads: columns of an accumulator fragment
constexpr int kOwn = kHeads / 4;     // heads of which a thread holds elements
constexpr int kQTile = kHeads * 128;  // Q in tiles like K's, kHeads rows each
constexpr int kQRope = kLatentTiles * kQTile;
constexpr int kQBytes = (kHeads * D_QK + 1023) / 1024 * 1024;  // the 128-byte swizzle repeats every 1,024 bytes
constexpr u32 kQLines = (D_QK + 127) / 128;  // of L2, that a row of Q touches when it starts with one
constexpr int kPBytes = kHeads * kBlock;
constexpr int kTiles = kDv / 64;  // m64 tiles of O^T
constexpr int kSteps = D_QK / 32;  // k-steps of S^T = K Q^T
constexpr int kPartSteps = 6;      // of them are accumulated together
constexpr int kParts = (kSteps + kPartSteps - 1) / kPartSteps;
constexpr u32 kDepth = HEADS < 24 ? 4 : 2;  // tiles of O^T in the making: as many as there are registers for
constexpr u32 kVBuffers = kDepth + 1;  // a tile of V is read while those before it are multiplied
constexpr u32 kRoundTiles = 32 / HEADS;  // tiles that each warpgroup gives the other at a time
constexpr int kExchange = kRoundTiles * kHeads * 256;  // bytes of them in float32
constexpr int kMaxSplits = 8;  // CTAs of the largest cluster

constexpr int kThreads = 384;
constexpr u32 kAttendRegisters = HEADS < 24 ? 208 : HEADS == 24 ? 216 : KV_SCALES ? 232 : 224;
constexpr u32 kProducerRegisters = 504 - 2 * kAttendRegisters;  // 128 x 504: what a launch of 384 threads gives

// Shared memory, by byte offset. Tiles want 1024-byte alignment (the swizzles repeat within it).
constexpr u32 kAtK = 0;                                    // [kStages][kStageBytes]
constexpr u32 kAtQ = kAtK + kStages * kStageBytes;         // [2][kQBytes]
constexpr u32 kAtP = kAtQ + 2 * kQBytes;                   // [2 warpgroups][kPBytes]: 8 heads x 16 slots core matrices
constexpr u32 kPEnd = kAtP + 2 * kPBytes;
constexpr bool kExchangeOverQ = HEADS >= 24;               // of the item that ends, where there is no other room
constexpr u32 kAtExchange = kExchangeOverQ ? kAtQ : kPEnd;  // [2 warpgroups][kExchange]
constexpr u32 kAtMaxima = kPEnd + (kExchangeOverQ ? 0 : 2 * kExchange);  // float [2 warpgroups][kHeads][4 warps]; sums, in the end
constexpr u32 kAtTops = kAtMaxima + 32 * kHeads;           // float [2 warpgroups][kHeads][4 warps]
constexpr u32 kAtReference = kAtTops + 32 * kHeads;        // float [2 warpgroups][kHeads]
constexpr u32 kAtShare = kAtReference + 8 * kHeads;        // float [2 warpgroups][kHeads]
constexpr u32 kAtC = kAtShare + 8 * kHeads;                // float [2 warpgroups][kHeads]
constexpr u32 kAtKvScale = kAtC + 8 * kHeads;              // float [kStages][kBlock]
constexpr u32 kAtValid = kAtKvScale + kStages * kBlock * 4;  // u64 [kStages], bit r: slot r of the block is valid
constexpr u32 kAtKFull = kAtValid + kStages * 8;           // mbarriers from here
constexpr u32 kAtKEmpty = kAtKFull + kStages * 8;
constexpr u32 kAtQFull = kAtKEmpty + kStages * 8;
constexpr u32 kAtQEmpty = kAtQFull + 2 * 8;
constexpr u32 kAtBoth = kAtQEmpty + 2 * 8;
constexpr u32 kAtPair = kAtBoth + 8;  // [4 warps]
constexpr u32 kSharedBytes = kAtPair + 4 * 8;
static_assert(!kExchangeOverQ || 2 * kExchange <= kQBytes, "an exchange must fit over Q");
static_assert(kSharedBytes <= 232448, "more than a CTA of compute capability 9.0 can have");

// A CTA of a split leaves its part here, over the stages it has used: O^T, float4 [kTiles][kGroups][128 threads], then its
// statistics, float [3][kHeads], and the weight of each CTA's part, float [kMaxSplits][kHeads].
constexpr u32 kAtPart = kAtK;
constexpr u32 kAtStatistics = kAtPart + kTiles * kGroups * 128 * 16;
constexpr u32 kAtWeights = kAtStatistics + 3 * kHeads * 4;
static_assert(kAtWeights + kMaxSplits * kHeads * 4 <= kAtQ, "a part must fit into the stages");

// Shared memory by address. The base stays in a register; a generic pointer would be converted at each use.
struct Memory {
  u32 base;
  DEVICE u32 k(u32 slot) const { return base + kAtK + slot * kStageBytes; }
  DEVICE u32 q(u32 buffer) const { return base + kAtQ + buffer * kQBytes; }
  DEVICE u32 p(u32 half) const { return base + kAtP + half * kPBytes; }
  DEVICE u32 exchange(u32 buffer, u32 half) const {
    return base + kAtExchange + (kExchangeOverQ ? buffer * kQBytes : 0) + half * kExchange;
  }
  DEVICE u32 maximum(u32 half, u32 head, u32 warp) const { return base + kAtMaxima + ((half * kHeads + head) * 4 + warp) * 4; }
  DEVICE u32 top(u32 half, u32 head, u32 warp) const { return base + kAtTops + ((half * kHeads + head) * 4 + warp) * 4; }
  DEVICE u32 c(u32 half, u32 head) const { return base + kAtC + (half * kHeads + head) * 4; }
  DEVICE u32 reference(u32 half, u32 head) const { return base + kAtReference + (half * kHeads + head) * 4; }
  DEVICE u32 share(u32 half, u32 head) const { return base + kAtShare + (half * kHeads + head) * 4; }
  DEVICE u32 kv_scale(u32 slot, u32 row) const { return base + kAtKvScale + (slot * kBlock + row) * 4; }
  DEVICE u32 valid(u32 slot) const { return base + kAtValid + slot * 8; }
  DEVICE u32 k_full(u32 slot) const { return base + kAtKFull + slot * 8; }
  DEVICE u32 k_empty(u32 slot) const { return base + kAtKEmpty + slot * 8; }
  DEVICE u32 q_full(u32 buffer) const { return base + kAtQFull + buffer * 8; }
  DEVICE u32 q_empty(u32 buffer) const { return base + kAtQEmpty + buffer * 8; }
  DEVICE u32 both() const { return base + kAtBoth; }
  DEVICE u32 pair(u32 warp) const { return base + kAtPair + warp * 8; }
  DEVICE u32 part(u32 i) const { return base + kAtPart + i * 16; }
  DEVICE u32 statistic(u32 which, u32 head) const { return base + kAtStatistics + (which * kHeads + head) * 4; }
  DEVICE u32 weight(u32 split, u32 head) const { return base + kAtWeights + (split * kHeads + head) * 4; }
};

// Which items this CTA computes: `splits` CTAs, a cluster, share one, and then a CTA has no other.
struct Work {
  int item, step, items, groups;
  u32 split, splits;
};

DEVICE Work work_of(const PrefillParams& params) {
  const u32 splits = max(1, params.ctas_per_item);
  const int groups = (params.h_q + kHeads - 1) / kHeads;
  return {static_cast<int>(opaque(blockIdx.x) / splits), static_cast<int>(gridDim.x / splits), params.s_q * groups, groups,
          blockIdx.x % splits, splits};
}

// The blocks of an item that fall to this CTA. A query without slots has none.
struct Blocks {
  int token, first_head, length, begin, end;
};

DEVICE Blocks blocks_of(const PrefillParams& params, const Work& work, int item) {
  Blocks b;
  b.token = item / work.groups;
  b.first_head = item % work.groups * kHeads;
  b.length = length_of(params, b.token);
  const u32 blocks = (b.length + kBlock - 1) / kBlock;
  b.begin = blocks * work.split / work.splits;
  b.end = blocks * (work.split + 1) / work.splits;
  return b;
}

// ---- producer --------------------------------------------------------------------------------------------------
//
// Warp w gathers rows 16 w .. 16 w + 15 of each block. Eight lanes copy 128 contiguous bytes, a warp four rows. Rows of 576
// bytes start at a 128-byte line or in the middle of one; copies keep to the lines, so an odd row is read as 64 + 4 x 128
// bytes and an even one as 4 x 128 + 64. That is half again as fast as copies that straddle lines.

struct Producer {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp;
  Ring<kStages> stage;
  u32 turn = 0;  // items done: Q goes into two buffers by turns

  DEVICE int load_index(int token, int length, int block) const {
    const int slot = block * kBlock + warp * 16 + (lane & 15);
    return slot < length ? __ldg(params.indices + token * params.indices_stride + slot) : -1;
  }

  // Q of an item, zeros for heads past h_q
  DEVICE void load_q(const Blocks& blocks) {
    mbarrier_wait(memory.q_empty(turn & 1), turn >> 1 & 1 ^ 1);
    const u32 q = memory.q(turn & 1);
#pragma unroll 1
    for (u32 row = warp; row < kHeads; row += 4) {
      const int head = blocks.first_head + row;
      const u32 bytes = head < params.h_q ? 16 : 0;
      const u8* source = params.q + blocks.token * params.q_stride_token + (bytes ? head : 0) * params.q_stride_head + lane * 16;
      cp_async_16(q + lane / 8 * kQTile + row * 128 + ((lane ^ row) % 8 << 4), source, bytes);
      if (D_QK > kDv && lane < 4) cp_async_16(q + kQRope + row * 64 + ((lane ^ row >> 1) % 4 << 4), source + kDv, bytes);
    }
    cp_async_arrive(memory.q_full(turn & 1));
    turn++;
  }

  // Q into L2, an item ahead
  DEVICE void prefetch_q(const Blocks& blocks) const {
    if (lane >= kQLines) return;
    const int end = min(blocks.first_head + kHeads, params.h_q);
#pragma unroll 1
    for (int head = blocks.first_head + warp; head < end; head += 4) {
      prefetch_l2(params.q + blocks.token * params.q_stride_token + head * params.q_stride_head + min(lane * 128, D_QK - 1u));
    }
  }

  // With registers enough, a block's addresses are computed before its copies and kept: else each copy takes the
  // registers of the last one's, and waits for it.
  static constexpr bool kAddressesFirst = kProducerRegisters > 40;
  template <typename T>
  DEVICE static T kept(T x) {
    if constexpr (kAddressesFirst) return opaque(x);
    return x;
  }

  DEVICE const u8* row_of(int index) const {
    return params.kv + static_cast<u64>(static_cast<u32>(max(index, 0))) * static_cast<u32>(params.kv_stride);
  }

  // Issues the copies of one block; k_full completes when they have landed.
  DEVICE void gather(int index) {
    const u32 slot = stage.slot;
    mbarrier_wait(memory.k_empty(slot), stage.parity ^ 1);
    const bool index_valid = static_cast<u32>(index) < static_cast<u32>(params.s_kv);
    if (!index_valid) index = -1;
    const u32 valid = __ballot_sync(~0u, index_valid);
    if (lane == 0) {
      store_shared_u16(memory.valid(slot) + warp * 2, valid);
      mbarrier_arrive(memory.k_full(slot));
    }
    const u32 latent = memory.k(slot) + warp * 2048, rope = memory.k(slot) + kRope + warp * 1024;
    const u8 *source[4], *half_source[2];
    u32 first[4], last[4]{}, bytes[4], half[2], half_bytes[2];
    const auto copy_lines = [&](u32 pass) {
#pragma unroll
      for (u32 line = 0; line < 3; line++) {
        cp_async_16(first[pass] + line * kLatentTile, source[pass] + line * 128, bytes[pass]);
      }
      cp_async_16(last[pass], source[pass] + 3 * 128, bytes[pass]);
    };
#pragma unroll
    for (u32 pass = 0; pass < 4; pass++) {
      // Kept from block to block, what follows from the lane would not fit in few registers.
      const u32 own_lane = kAddressesFirst ? lane : opaque(lane);
      const u32 r = 4 * pass + (own_lane >> 3);
      const int i = __shfl_sync(~0u, index, r);
      const u8* row = row_of(i);
      // Lane l of a line copies chunk l + 8 line of the row: in an odd row shifted by 4, and the last ones are rope.
      const u32 odd = D_QK > kDv ? static_cast<u32>(reinterpret_cast<u64>(row)) >> 6 & 1 : 0;
      const u32 chunk = (own_lane & 7) + 4 * odd;
      source[pass] = kept(row + chunk * 16);
      bytes[pass] = i >= 0 ? 16 : 0;
      first[pass] = kept(latent + chunk / 8 * kLatentTile + r * 128 + ((chunk ^ r) % 8 << 4));
      last[pass] = kept(chunk < 8 ? first[pass] + 3 * kLatentTile : rope + r * 64 + ((chunk ^ r >> 1) % 4 << 4));
      if (!kAddressesFirst) copy_lines(pass);
    }
    if constexpr (D_QK > kDv) {
      const u32 rope_lane = kAddressesFirst ? lane : opaque(lane);
#pragma unroll
      for (u32 pass = 0; pass < 2; pass++) {
        const u32 r = 8 * pass + (rope_lane >> 2), quarter = rope_lane & 3;
        const int i = __shfl_sync(~0u, index, r);
        const u8* row = row_of(i);
        const bool odd = static_cast<u32>(reinterpret_cast<u64>(row)) >> 6 & 1;
        half_source[pass] = kept(row + (odd ? 0 : kDv) + quarter * 16);
        half_bytes[pass] = i >= 0 ? 16 : 0;
        half[pass] = kept(odd ? latent + r * 128 + ((quarter ^ r) % 8 << 4) : rope + r * 64 + ((quarter ^ r >> 1) % 4 << 4));
        if (!kAddressesFirst) cp_async_16(half[pass], half_source[pass], half_bytes[pass]);
      }
    }
    if constexpr (kAddressesFirst) {
#pragma unroll
      for (u32 pass = 0; pass < 4; pass++) copy_lines(pass);
      if constexpr (D_QK > kDv) {
#pragma unroll
        for (u32 pass = 0; pass < 2; pass++) cp_async_16(half[pass], half_source[pass], half_bytes[pass]);
      }
    }
    if constexpr (kKvScales) {
      if (lane < 16) cp_async_4(memory.kv_scale(slot, warp * 16 + lane), params.kv_scale + max(index, 0), index >= 0 ? 4 : 0);
    }
    cp_async_arrive(memory.k_full(slot));
    stage.next();
  }

  DEVICE void run(const Work& work) {
    int item = work.item;
    if (item >= work.items) return;
    Blocks blocks = blocks_of(params, work, item);
    int index = load_index(blocks.token, blocks.length, blocks.begin);
    while (true) {
      load_q(blocks);
      item += work.step;
      const bool more = item < work.items;
      const Blocks next = more ? blocks_of(params, work, item) : Blocks{0, 0, 0, 0, 0};
      if (more) prefetch_q(next);
      for (int block = blocks.begin; block < blocks.end; block++) {
        // The indices of the next block are on their way while this one's rows are asked for.
        const bool last = block + 1 == blocks.end;
        const int ahead = load_index(last ? next.token : blocks.token, last ? next.length : blocks.length,
                                     last ? next.begin : block + 1);
        gather(index);
        index = ahead;
      }
      if (!more) break;
      if (blocks.begin == blocks.end) index = load_index(next.token, next.length, next.begin);
      blocks = next;
    }
  }
};

// ---- attend ----------------------------------------------------------------------------------------------------
//
// Of an accumulator of S^T, lane 4 g + i of warp w holds rows (slots) 16 w + g and 16 w + g + 8, columns (heads) 8 n + 2 i
// and + 1: d[4n] d[4n+1] of the first slot, d[4n+2] d[4n+3] of the second. A head's maximum runs over the eight g of each
// warp and over the four warps. In O^T row g is column 2 g of the warp's 16, row g + 8 is column 2 g + 1.

struct Attend {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp, half;
  Ring<kStages> stage;
  u32 turn = 0;  // items done: Q comes in two buffers by turns
  float o[kTiles][kHeads / 2];
  float c[kOwn], reference[kOwn], sum[kOwn], top[kOwn];  // own head e is head(e)

  DEVICE u32 head(u32 e) const { return 8 * (e / 2) + 2 * (lane & 3) + e % 2; }
  DEVICE u32 thread() const { return warp * 32 + lane; }
  DEVICE void sync() const { barrier_sync(1 + half, 128); }

  DEVICE float q_scale(int token, int h) const {
    return __ldg(params.q_scale + static_cast<i64>(token) * params.q_scale_stride_token +
                 min(h, params.h_q - 1) * params.q_scale_stride_head);
  }
  DEVICE float kv_scale_of_all() const { return kKvScales ? 1.f : __ldg(params.kv_scale); }

  DEVICE void start(const Blocks& blocks) {
    if (thread() < kHeads) {
      const float scale = q_scale(blocks.token, blocks.first_head + thread());
      store_shared_float(memory.c(half, thread()), to_c(params, scale, kv_scale_of_all()));
    }
#pragma unroll
    for (u32 e = 0; e < kOwn; e++) {
      reference[e] = kLowest;
      sum[e] = 0.f;
      top[e] = -kInfinity;
    }
#pragma unroll
    for (u32 m = 0; m < kTiles; m++) {
#pragma unroll
      for (u32 i = 0; i < kHeads / 2; i++) o[m][i] = 0.f;
    }
    sync();  // c is there
#pragma unroll
    for (u32 n = 0; n < kGroups; n++) {
      const float2 x = load_shared_float2(memory.c(half, head(2 * n)));
      c[2 * n] = x.x;
      c[2 * n + 1] = x.y;
    }
    mbarrier_wait(memory.q_full(turn & 1), turn >> 1 & 1);
  }

  // S^T = K[stage] Q^T, in parts of 192 columns, left in flight
  //
  // A warpgroup waits for its own blocks only, and may come to a stage whose last block, b - 5 and the other's, it has not
  // seen full: to the parity that would look like b being full. But it has seen its own b - 2 full, or all blocks before
  // this item, and the arrivals of a thread of the producer come in the order of its copies.
  DEVICE void start_scores(float (&part)[kParts][kHeads / 2]) {
    mbarrier_wait(memory.k_full(stage.slot), stage.parity);
    fence_async_shared();  // K and Q came by cp.async and are read by wgmma
    const u32 k = memory.k(stage.slot), q = memory.q(turn & 1);
    const u64 k_latent = descriptor(descriptor_shape(16, 1024, Swizzle::bytes_128), k);
    const u64 q_latent = descriptor(descriptor_shape(16, 1024, Swizzle::bytes_128), q);
    const u64 k_rope = descriptor(descriptor_shape(16, 512, Swizzle::bytes_64), k + kRope);
    const u64 q_rope = descriptor(descriptor_shape(16, 512, Swizzle::bytes_64), q + kQRope);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < kSteps; step++) {
      const u32 inside = step % 4 * 2;
      const u64 a = step < 16 ? k_latent + step / 4 * (kLatentTile >> 4) + inside : k_rope + inside;
      const u64 b = step < 16 ? q_latent + step / 4 * (kQTile >> 4) + inside : q_rope + inside;
      wgmma_shared<kHeads>(part[step / kPartSteps], a, b, step % kPartSteps > 0);
    }
    wgmma_commit();
  }

  DEVICE static void sum_parts(float (&s)[kHeads / 2], const float (&part)[kParts][kHeads / 2]) {
#pragma unroll
    for (u32 i = 0; i < kHeads / 2; i++) {
      s[i] = part[0][i] + part[1][i];
#pragma unroll
      for (u32 p = 2; p < kParts; p++) s[i] += part[p][i];
    }
  }

  // -inf for the logits of invalid slots. Where tokens have scales k: also S to logits in units of log2, and log2 k added,
  // what P is a power of; `k_log2` is that of the two slots.
  DEVICE void mask_and_scale(float (&s)[kHeads / 2], float (&k_log2)[2]) {
    const u64 all = load_shared_u64(memory.valid(stage.slot));
    if constexpr (!kKvScales) {
      if (__builtin_expect(all == ~0ull, 1)) return;
    }
    const u64 valid = all >> (warp * 16 + (lane >> 2));
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const bool in = valid >> 8 * r & 1;
      float k = 1.f;
      if constexpr (kKvScales) {
        k = load_shared_float(memory.kv_scale(stage.slot, warp * 16 + (lane >> 2) + 8 * r));
        k = !in ? 1.f : is_scale(k) ? k : kNan;
        k_log2[r] = log2_approx(fmaxf(k, kLeastPower));
      }
#pragma unroll
      for (u32 n = 0; n < kGroups; n++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
          float& x = s[4 * n + 2 * r + e];
          if constexpr (kKvScales) x *= c[2 * n + e] * k;
          if (!in) x = -kInfinity;
          if constexpr (kKvScales) {
            top[2 * n + e] = fmaxf(top[2 * n + e], x);
            x += k_log2[r];
          }
        }
      }
    }
  }

  // Combines a value of each own head over the lanes that hold elements of it, and stores the warp's. Each step
  // halves the heads that a lane goes on with, while there are two: 7 shuffles for 8 heads, not 24.
  template <typename Combine>
  DEVICE void store_over_slots(u32 (Memory::*where)(u32, u32, u32) const, float (&x)[kOwn], Combine combine) const {
    u32 e = 0, count = kOwn;
    bool first = true;  // of the lanes that end up with the same head
#pragma unroll
    for (u32 lanes = 16; lanes >= 4; lanes /= 2) {
      const bool upper = lane & lanes;
      if (count % 2 == 0) {
        count /= 2;
        e += upper ? count : 0;
#pragma unroll
        for (u32 k = 0; k < count; k++) {
          const float kept = upper ? x[k + count] : x[k], sent = upper ? x[k] : x[k + count];
          x[k] = combine(kept, __shfl_xor_sync(~0u, sent, lanes));
        }
      } else {
        first = first && !upper;
#pragma unroll
        for (u32 k = 0; k < count; k++) x[k] = combine(x[k], __shfl_xor_sync(~0u, x[k], lanes));
      }
    }
    if (!first) return;
#pragma unroll
    for (u32 k = 0; k < count; k++) store_shared_float((memory.*where)(half, head(e + k), warp), x[k]);
  }

  // What turns S into logits in units of log2; with scales of tokens mask_and_scale does.
  DEVICE float c_of(u32 e) const { return kKvScales ? 1.f : c[e]; }

  // Moves the references to the new maxima; `factor` is what O and the sums are multiplied by.
  DEVICE void move_references(const float (&s)[kHeads / 2], float (&factor)[kOwn]) {
    float most[kOwn];
#pragma unroll
    for (u32 e = 0; e < kOwn; e++) most[e] = fmaxf(s[e / 2 * 4 + e % 2], s[e / 2 * 4 + 2 + e % 2]);
    store_over_slots(&Memory::maximum, most, [](float a, float b) { return fmaxf(a, b); });
    sync();
    // Lane 4 g + i reads the maxima of own head g alone, and lanes hand them round: a 16-byte load of a warp is four
    // passes through shared memory, whoever asks for the same.
    const float4 x = load_shared_float4(memory.maximum(half, head(min(lane >> 2, kOwn - 1u)), 0));
    const float maximum = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
#pragma unroll
    for (u32 e = 0; e < kOwn; e++) {
      const float moved = fmaxf(reference[e], fmaf(__shfl_sync(~0u, maximum, 4 * e + (lane & 3)), c_of(e), -kHeadroom));
      factor[e] = exp2_approx(reference[e] - moved);
      reference[e] = moved;
    }
  }

  // P = 2^(c S - ref), to e4m3 and, transposed, to shared memory. Slots g and g + 8 of a warp's 16 become neighbours: a row
  // of P holds them in the order 0 8 1 9 ... 7 15.
  DEVICE void write_p(const float (&s)[kHeads / 2], const float (&k_log2)[2], const float (&factor)[kOwn]) {
    u32 packed[kGroups];
#pragma unroll
    for (u32 n = 0; n < kGroups; n++) {
      float x[4];
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        float added = 0.f;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
          const float exponent = fmaf(s[4 * n + 2 * r + e], c_of(2 * n + e), -reference[2 * n + e]);
          x[2 * e + r] = exp2_approx(exponent);
          added += kKvScales ? exp2_approx(exponent - k_log2[r]) : x[2 * e + r];
        }
        sum[2 * n + e] = fmaf(sum[2 * n + e], factor[2 * n + e], added);
      }
      packed[n] = pack_e4m3(x[0], x[1], x[2], x[3]);
    }
    const u32 place = memory.p(half) + warp * (16 * kHeads);
    if constexpr (kGroups == 3) {
      stmatrix_trans(place + (lane & 15) * 16, {packed[0], packed[1]});
      stmatrix_trans(place + 256 + (lane & 7) * 16, {packed[2]});
    } else {
      stmatrix_trans(place + (lane & (kHeads - 1)) * 16, packed);
    }
  }

  // V^T of slots 32 step .. + 31 in m64 tile m, columns still in pairs
  DEVICE void load_v(u32 (&v)[4], u32 step, u32 m) const {
    const u32 base = memory.k(stage.slot) + lane * 128 + ((warp ^ (lane & 7)) << 4);
    ldmatrix_x4_trans(v, (base ^ ((m & 1) << 6)) + (m >> 1) * kLatentTile + step * 4096);
  }

  // Parts the columns and pairs the slots as P has them: the A operand of wgmma
  DEVICE static void part_columns(u32 (&v)[4]) {
    const u32 r[4] = {v[0], v[1], v[2], v[3]};
    v[0] = select_bytes(r[0], r[1], 0x6240);
    v[1] = select_bytes(r[0], r[1], 0x7351);
    v[2] = select_bytes(r[2], r[3], 0x6240);
    v[3] = select_bytes(r[2], r[3], 0x7351);
  }

  DEVICE void add(u32 m, const float (&t)[kHeads / 2], const float (&factor)[kOwn]) {
#pragma unroll
    for (u32 i = 0; i < kHeads / 2; i++) o[m][i] = fmaf(o[m][i], factor[i / 4 * 2 + i % 2], t[i]);
  }

  // O^T = O^T factor + V[stage]^T P^T, kDepth tiles under way
  DEVICE void multiply_values(u32 (&v)[kVBuffers][2][4], const float (&factor)[kOwn]) {
    const u64 p = descriptor(descriptor_shape(16 * kHeads, 128, Swizzle::none), memory.p(half));
    float t[kDepth][kHeads / 2];
#pragma unroll
    for (u32 m = 0; m < kTiles; m++) {
      auto& a = v[m % kVBuffers];
      part_columns(a[0]);
      part_columns(a[1]);
      wgmma_fence();
      wgmma_registers<kHeads>(t[m % kDepth], a[0], p, 0);
      wgmma_registers<kHeads>(t[m % kDepth], a[1], p + (32 * kHeads >> 4), 1);
      wgmma_commit();
      if (m + 1 < kTiles) {  // over V of tile m - kDepth, whose product was waited for
        load_v(v[(m + 1) % kVBuffers][0], 0, m + 1);
        load_v(v[(m + 1) % kVBuffers][1], 1, m + 1);
      }
      if (m + 2 == kTiles) mbarrier_arrive(memory.k_empty(stage.slot));
      if (m + 1 >= kDepth) {
        const u32 done = m + 1 - kDepth;
        wgmma_wait<kDepth - 1>();
        add(done, t[done % kDepth], factor);
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (u32 m = kTiles + 1 - kDepth; m < kTiles; m++) add(m, t[m % kDepth], factor);
  }

  DEVICE void attend() {
    float s[kHeads / 2], factor[kOwn], k_log2[2];
    u32 v[kVBuffers][2][4];
    {
      float part[kParts][kHeads / 2];
      start_scores(part);
      load_v(v[0][0], 0, 0);  // V is the K tile: its first fragments are read under the product
      load_v(v[0][1], 1, 0);
      wgmma_wait<0>();
      sum_parts(s, part);
    }
    mask_and_scale(s, k_log2);
    move_references(s, factor);  // its barrier: P may be overwritten, all four warps are through with the last product
    write_p(s, k_log2, factor);
    fence_async_shared();  // P was stored by stmatrix and is read by wgmma
    sync();
    multiply_values(v, factor);
  }

  // What both warpgroups know of a head when they meet: log2 of the scale of its P, the sum of P, the largest logit.
  struct Statistics {
    float reference, total, top;
  };

  DEVICE Statistics statistics(u32 head) const {
    Statistics x[2];
#pragma unroll
    for (u32 w = 0; w < 2; w++) {
      x[w].reference = load_shared_float(memory.reference(w, head));
      const float4 sums = load_shared_float4(memory.maximum(w, head, 0));
      x[w].total = (sums.x + sums.y) + (sums.z + sums.w);
      x[w].top = x[w].reference + kHeadroom;
      if constexpr (kKvScales) {
        const float4 tops = load_shared_float4(memory.top(w, head, 0));
        x[w].top = fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w));
      }
    }
    const float both = fmaxf(x[0].reference, x[1].reference);
    // Rounded products: a fused one of the two would make the sum depend on which warpgroup had which blocks.
    const float total = __fadd_rn(__fmul_rn(x[0].total, exp2_approx(x[0].reference - both)),
                                  __fmul_rn(x[1].total, exp2_approx(x[1].reference - both)));
    return {both, total, fmaxf(x[0].top, x[1].top)};
  }

  // The scale of V; NaN where a scale of head h is bad.
  DEVICE float value_scale(int token, int h) const {
    const float v_scale = kv_scale_of_all();
    return is_scale(q_scale(token, h)) && is_scale(v_scale) ? v_scale : kNan;
  }

  DEVICE float denominator(const Statistics& x, int h) const {
    if (params.attn_sink == nullptr) return x.total;
    return x.total + exp2_approx(__ldg(params.attn_sink + min(h, params.h_q - 1)) * kLog2e - x.reference);
  }

  DEVICE void store_statistics(int token, int h, const Statistics& x, float v_scale) const {
    if (h >= params.h_q) return;
    const bool empty = x.total == 0.f;
    // A NaN logit is lost in fmaxf but not in the sum; v_scale carries a bad scale.
    const float poison = (x.total + v_scale) * 0.f;
    const i64 at = static_cast<i64>(token) * params.out_heads + h;
    params.max_logits[at] = empty ? -kInfinity : x.top * kLn2 + poison;
    params.lse[at] = empty ? kInfinity : (x.reference + log2_approx(x.total)) * kLn2 + poison;
  }

  // Columns 64 m + 16 warp + 2 g and + 1 of heads h and h + 1
  DEVICE void store_out(int token, int h, u32 m, u32 owner_warp, u32 g, float4 x) const {
    u32* out = params.out + (static_cast<i64>(token) * params.out_heads + h) * (kDv / 2) + m * 32 + owner_warp * 8 + g;
    if (h < params.h_q) out[0] = pack_bf16(x.x, x.z);
    if (h + 1 < params.h_q) out[kDv / 2] = pack_bf16(x.y, x.w);
  }

  // Returns when all that meet at a barrier are there, for the `time`th time. The warpgroups meet once an item, and a warp
  // of one and that of the other which it exchanges O with an odd number of times: so `turn` knows the parity.
  //
  // Not a named barrier: across one of 256 of the CTA's threads racecheck reported hazards.
  DEVICE static void meet(u32 barrier, u32 time) {
    mbarrier_arrive(barrier);
    mbarrier_wait(barrier, time & 1);
  }

  // The end of an item: the two warpgroups add up their parts, each 256 columns, and this CTA's part goes out, to the
  // outputs or, where the item is split, to shared memory for the others of the cluster.
  DEVICE void finish(const Blocks& blocks, const Work& work) {
    store_over_slots(&Memory::maximum, sum, [](float a, float b) { return a + b; });
    if (kKvScales) store_over_slots(&Memory::top, top, [](float a, float b) { return fmaxf(a, b); });
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (u32 e = 0; e < kOwn; e++) store_shared_float(memory.reference(half, head(e)), reference[e]);
    }
    meet(memory.both(), turn);
    const bool alone = work.splits == 1;
    if (thread() < kHeads) {  // what this warpgroup's part is multiplied by
      const Statistics x = statistics(thread());
      const int h = blocks.first_head + thread();
      float share = exp2_approx(load_shared_float(memory.reference(half, thread())) - x.reference);
      if (alone) {
        const float v_scale = value_scale(blocks.token, h);
        share = x.total == 0.f ? 0.f : share * v_scale / denominator(x, h);
        if (half == 0) store_statistics(blocks.token, h, x, v_scale);
      } else if (half == 0) {
        store_shared_float(memory.statistic(0, thread()), x.reference);
        store_shared_float(memory.statistic(1, thread()), x.total);
        store_shared_float(memory.statistic(2, thread()), x.top);
      }
      store_shared_float(memory.share(half, thread()), share);
    }
    sync();
#pragma unroll
    for (u32 round = 0; round < kTiles / 2; round += kRoundTiles) {
      // Tiles 0 .. 3 end in warpgroup 0, 4 .. 7 in warpgroup 1. A tile's place in o must be known when compiling.
#pragma unroll
      for (u32 n = 0; n < kGroups; n++) {
        const float2 share = load_shared_float2(memory.share(half, head(2 * n)));
#pragma unroll
        for (u32 i = 0; i < kRoundTiles; i++) {
          const float* low = o[round + i] + 4 * n;
          const float* high = o[round + i + kTiles / 2] + 4 * n;
          const u32 given = memory.exchange(turn & 1, half) + ((i * kGroups + n) * 128 + thread()) * 16;
          if (half == 0) {
            store_shared_float4(given, high[0] * share.x, high[1] * share.y, high[2] * share.x, high[3] * share.y);
          } else {
            store_shared_float4(given, low[0] * share.x, low[1] * share.y, low[2] * share.x, low[3] * share.y);
          }
        }
      }
      meet(memory.pair(warp), turn);
#pragma unroll
      for (u32 n = 0; n < kGroups; n++) {
        const float2 share = load_shared_float2(memory.share(half, head(2 * n)));
#pragma unroll
        for (u32 i = 0; i < kRoundTiles; i++) {
          const u32 m = round + i + half * (kTiles / 2);
          float4 x = load_shared_float4(memory.exchange(turn & 1, half ^ 1) + ((i * kGroups + n) * 128 + thread()) * 16);
          float own[4];
#pragma unroll
          for (u32 k = 0; k < 4; k++) {
            const float mine = half == 0 ? o[round + i][4 * n + k] : o[round + i + kTiles / 2][4 * n + k];
            own[k] = __fmul_rn(mine, k % 2 ? share.y : share.x);
          }
          x = make_float4(__fadd_rn(x.x, own[0]), __fadd_rn(x.y, own[1]), __fadd_rn(x.z, own[2]), __fadd_rn(x.w, own[3]));
          if (alone) {
            store_out(blocks.token, blocks.first_head + head(2 * n), m, warp, lane >> 2, x);
          } else {
            store_shared_float4(memory.part((m * kGroups + n) * 128 + thread()), x.x, x.y, x.z, x.w);
          }
        }
      }
      if (round + kRoundTiles < kTiles / 2) meet(memory.pair(warp), turn + 1);
    }
    mbarrier_arrive(memory.q_empty(turn & 1));
    turn++;
    if (!alone) combine(blocks, work);
  }

  // Adds up the parts of a split item in the order of the CTAs, each CTA some of the columns.
  DEVICE void combine(const Blocks& blocks, const Work& work) const {
    cluster_sync();
    const u32 first = half * 128 + thread();
    for (u32 at = first; at < work.splits * kHeads; at += 256) {
      const u32 own = at / kHeads, head = at % kHeads;
      const int h = blocks.first_head + head;
      Statistics x{kLowest, 0.f, -kInfinity};
      for (u32 split = 0; split < work.splits; split++) {
        x.reference = fmaxf(x.reference, load_cluster_float(cluster_address(memory.statistic(0, head), split)));
      }
      float scale = 0.f;
      for (u32 split = 0; split < work.splits; split++) {
        const float to_all = exp2_approx(load_cluster_float(cluster_address(memory.statistic(0, head), split)) - x.reference);
        x.total = fmaf(load_cluster_float(cluster_address(memory.statistic(1, head), split)), to_all, x.total);
        x.top = fmaxf(x.top, load_cluster_float(cluster_address(memory.statistic(2, head), split)));
        if (split == own) scale = to_all;
      }
      const float v_scale = value_scale(blocks.token, h);
      store_shared_float(memory.weight(own, head), x.total == 0.f ? 0.f : scale * v_scale / denominator(x, h));
      if (work.split == 0 && own == 0) store_statistics(blocks.token, h, x, v_scale);
    }
    meet(memory.both(), 1);
    for (u32 at = work.split * 256 + first; at < kTiles * kGroups * 128; at += work.splits * 256) {
      const u32 m = at / (kGroups * 128), n = at / 128 % kGroups, owner = at % 128;
      const u32 head = 8 * n + 2 * (owner & 3);
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      for (u32 split = 0; split < work.splits; split++) {
        const float4 y = load_cluster_float4(cluster_address(memory.part(at), split));
        const float2 w = load_shared_float2(memory.weight(split, head));
        x.x = fmaf(y.x, w.x, x.x);
        x.y = fmaf(y.y, w.y, x.y);
        x.z = fmaf(y.z, w.x, x.z);
        x.w = fmaf(y.w, w.y, x.w);
      }
      store_out(blocks.token, blocks.first_head + head, m, owner >> 5, owner >> 2 & 7, x);
    }
    cluster_sync();  // a CTA must not exit while its part is read
  }

  DEVICE void run(const Work& work) {
    // The warpgroup that takes an item's first block alternates, so that both work where items have a single one.
    u32 first = half;
    for (int item = work.item; item < work.items; item += work.step, first ^= 1) {
      const Blocks blocks = blocks_of(params, work, item);
      const int count = blocks.end - blocks.begin;
      start(blocks);
      if (first == 1 && count > 0) stage.next();
      for (int b = first; b < count; b += 2) {
        attend();
        stage.next();
        if (b + 1 < count) stage.next();
      }
      finish(blocks, work);
    }
  }
};

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(kThreads, 1) void sparse_mla_prefill_few_heads(
    const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(1024) u8 shared[];
  const Memory memory{opaque(shared_address(shared))};
  // From a shuffle: what comes straight from threadIdx would be read and masked again at each use, 100 cycles each time.
  const u32 lane = __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31), warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const u32 role = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(memory.k_full(i), 128 + 4);  // producer: copies of all threads, and what its four warps store
      mbarrier_init(memory.k_empty(i), 128);     // the warpgroup that used it
    }
    for (int i = 0; i < 2; i++) {
      mbarrier_init(memory.q_full(i), 128);   // producer
      mbarrier_init(memory.q_empty(i), 256);  // both warpgroups
    }
    mbarrier_init(memory.both(), 256);                               // both warpgroups
    for (int i = 0; i < 4; i++) mbarrier_init(memory.pair(i), 64);  // a warp of each
    fence_mbarrier_init();
  }
  __syncthreads();
  if (role == 2) {
    set_max_registers_down<kProducerRegisters>();
    Producer{params, memory, lane, warp, {}}.run(work_of(params));
  } else {
    set_max_registers_up<kAttendRegisters>();
    Attend{params, memory, lane, warp, role, {}}.run(work_of(params));
  }
}
