// FP8 sparse MLA prefill on Hopper for few heads, 8, 16 or 32 at a time (-D HEADS), and for few queries. Also -D D_QK=512 or
// 576 and -D KV_SCALES=0 or 1; `backends/sm90.py` launches it.
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
// the time that the rows take to arrive, and the gather should be all that counts. Heads are the N of both products, S^T = K Q^T
// and O^T = V^T P^T, so no tensor work is done for heads that are not there, and O^T of 16 heads is 64 registers a thread:
// a warpgroup keeps a whole one of its own. It computes an item (a query token and HEADS heads) alone, from the first block of 64
// slots to the last, and never waits for another. Two of them (with 32 heads) or three share a CTA, its producer and its
// ring of stages, and hide each other's latencies.
//
//   producer    gathers blocks of items 0, 1, 2, 0, 1, 2, ...  by 16-byte cp.async into the ring
//   attend 0    S = K Q^T | softmax of S    | O^T = O^T factor + V^T P^T |  next block of item 0
//   attend 1              | S  | softmax         | O^T                          |  of item 1
//   attend 2                   | S | softmax             | O^T                     |  of item 2
//
// Where there are too few items for that, the warpgroups of a CTA, or of a cluster of CTAs, take parts of one item's slots
// and add up their O^T in the end, through shared memory.
//
// Time is left over, and buys accuracy: FP8 wgmma keeps some 14 bits of whatever it sums, so S is summed in three parts
// and each block's O in one, which are added in float32.
#pragma once

#include "common/problem.cuh"
#include "common/wgmma_narrow.cuh"

constexpr int kHeads = HEADS;  // N of both products
constexpr bool kKvScales = KV_SCALES;
constexpr u32 kWarpgroups = HEADS == 32 ? 2 : 3;  // that attend: as many as have registers
constexpr int kBlock = 64;     // slots a block: M of S^T = K Q^T
constexpr int kStages = 5;
constexpr int kQAfter = (kStages - 1) / kWarpgroups;  // blocks of a round that go into the ring before its Q
constexpr int kGroups = kHeads / 8;  // of 8 heads: columns of an accumulator fragment
constexpr int kOwn = kHeads / 4;     // heads of which a thread holds elements
constexpr int kLatentTile = 8192;    // 64 rows x 128 columns, 128-byte swizzle
constexpr int kLatentTiles = kDv / 128;
constexpr int kRopeTile = D_QK > kDv ? 4096 : 0;   // 64 rows x 64 columns, 64-byte swizzle
constexpr int kRope = kLatentTiles * kLatentTile;  // offset of the rope tile in a stage
constexpr int kStageBytes = kRope + kRopeTile;
constexpr int kQTile = kHeads * 128;  // Q in tiles like K's, kHeads rows each
constexpr int kQRope = kLatentTiles * kQTile;
constexpr int kQBytes = (kHeads * D_QK + 1023) / 1024 * 1024;  // the 128-byte swizzle repeats every 1,024 bytes
constexpr int kPBytes = kHeads * kBlock;
constexpr int kTiles = kDv / 64;  // m64 tiles of O^T
constexpr int kSteps = D_QK / 32;  // k-steps of S^T = K Q^T
constexpr int kPartSteps = 6;      // of them are accumulated together
constexpr int kParts = (kSteps + kPartSteps - 1) / kPartSteps;
constexpr u32 kMaxParts = 16 * kWarpgroups;  // of an item: 16 CTAs are the largest cluster

constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr u32 kAttendRegisters = HEADS == 32 ? 232 : 152;
constexpr u32 kProducerRegisters = HEADS == 32 ? 40 : 56;  // 128 x (3 x 152 + 56) and 128 x (2 x 232 + 40) <= 65,536

// Shared memory, by byte offset. Tiles want 1024-byte alignment (the swizzles repeat within it).
constexpr u32 kAtK = 0;                                    // [kStages][kStageBytes]
constexpr u32 kAtQ = kAtK + kStages * kStageBytes;         // [kWarpgroups][kQBytes]
constexpr u32 kAtP = kAtQ + kWarpgroups * kQBytes;         // [kWarpgroups][kPBytes]: 8 heads x 16 slots core matrices
constexpr u32 kAtMaxima = kAtP + kWarpgroups * kPBytes;    // float [kWarpgroups][4 warps][kHeads]; sums, in the end
constexpr u32 kAtTops = kAtMaxima + kWarpgroups * 16 * kHeads;     // float [kWarpgroups][4 warps][kHeads]
constexpr u32 kAtWeight = kAtTops + kWarpgroups * 16 * kHeads;     // float [kWarpgroups][kHeads]
constexpr u32 kAtKvScale = kAtWeight + kWarpgroups * 4 * kHeads;   // float [kStages][kBlock]
constexpr u32 kAtValid = kAtKvScale + kStages * kBlock * 4;  // u64 [kStages], bit r: slot r of the block is valid
constexpr u32 kAtKFull = kAtValid + kStages * 8;           // mbarriers from here
constexpr u32 kAtKEmpty = kAtKFull + kStages * 8;
constexpr u32 kAtQFull = kAtKEmpty + kStages * 8;
constexpr u32 kAtQEmpty = kAtQFull + kWarpgroups * 8;
constexpr u32 kSharedBytes = kAtQEmpty + kWarpgroups * 8;
static_assert(kSharedBytes <= 232448, "more than a CTA of compute capability 9.0 can have");

// Where an item is in parts, its warpgroups leave them here, over the stages they have used: O^T, float4 [kTiles][kGroups]
// [128 threads]; statistics, float [3][kHeads]; and then the weight of every part of the cluster, float [kMaxParts][kHeads].
constexpr u32 kPartBytes = kTiles * kGroups * 128 * 16;
constexpr u32 kAtPart = kAtK;                              // [kWarpgroups][kPartBytes]
constexpr u32 kAtStatistics = kAtPart + kWarpgroups * kPartBytes;  // [kWarpgroups][3][kHeads]
constexpr u32 kAtWeights = kAtStatistics + kWarpgroups * 12 * kHeads;
static_assert(kAtWeights + kMaxParts * kHeads * 4 <= kAtQ, "parts must fit into the stages");

// Named barriers: 1 for all warpgroups that attend, 2, 3, 4 for each of them.
constexpr u32 kAll = 1, kOwnBarrier = 2;

// Shared memory by address. The base stays in a register; a generic pointer would be converted at each use.
struct Memory {
  u32 base;
  DEVICE u32 k(u32 slot) const { return base + kAtK + slot * kStageBytes; }
  DEVICE u32 q(u32 group) const { return base + kAtQ + group * kQBytes; }
  DEVICE u32 p(u32 group) const { return base + kAtP + group * kPBytes; }
  DEVICE u32 maximum(u32 group, u32 warp, u32 head) const { return base + kAtMaxima + ((group * 4 + warp) * kHeads + head) * 4; }
  DEVICE u32 top(u32 group, u32 warp, u32 head) const { return base + kAtTops + ((group * 4 + warp) * kHeads + head) * 4; }
  DEVICE u32 weight(u32 group, u32 head) const { return base + kAtWeight + (group * kHeads + head) * 4; }
  DEVICE u32 kv_scale(u32 slot, u32 row) const { return base + kAtKvScale + (slot * kBlock + row) * 4; }
  DEVICE u32 valid(u32 slot) const { return base + kAtValid + slot * 8; }
  DEVICE u32 k_full(u32 slot) const { return base + kAtKFull + slot * 8; }
  DEVICE u32 k_empty(u32 slot) const { return base + kAtKEmpty + slot * 8; }
  DEVICE u32 q_full(u32 group) const { return base + kAtQFull + group * 8; }
  DEVICE u32 q_empty(u32 group) const { return base + kAtQEmpty + group * 8; }
  DEVICE u32 part(u32 group, u32 i) const { return base + kAtPart + group * kPartBytes + i * 16; }
  DEVICE u32 statistic(u32 group, u32 which, u32 head) const {
    return base + kAtStatistics + ((group * 3 + which) * kHeads + head) * 4;
  }
  DEVICE u32 weight_of_part(u32 part, u32 head) const { return base + kAtWeights + (part * kHeads + head) * 4; }
};

// What each warpgroup of a CTA computes. An item in parts is the only one of its cluster; else a warpgroup goes on with the
// item `step` further. All of them, and the producer, walk through the rounds together: one item, or part, for each.
struct Work {
  int item, step, items, head_groups;
  u32 part, parts;
};

DEVICE Work work_of(const PrefillParams& params, u32 warpgroup) {
  Work work;
  work.head_groups = (params.h_q + kHeads - 1) / kHeads;
  work.items = params.s_q * work.head_groups;
  const u32 ctas = params.ctas_per_item, own = opaque(blockIdx.x) * kWarpgroups + warpgroup;
  work.parts = max(1u, ctas * kWarpgroups);
  work.item = own / work.parts;
  work.part = own % work.parts;
  work.step = ctas > 0 ? work.items : gridDim.x * kWarpgroups;
  return work;
}

// The slots of a warpgroup in one round. A query without slots has no block, nor has a warpgroup without an item.
struct Slots {
  int token, first_head, length;
  int begin, blocks;  // the first block and their number
};

DEVICE Slots slots_of(const PrefillParams& params, const Work& work, int item) {
  Slots slots{0, 0, 0, 0, 0};
  if (item >= work.items) return slots;
  slots.token = item / work.head_groups;
  slots.first_head = item % work.head_groups * kHeads;
  slots.length = length_of(params, slots.token);
  const u32 blocks = (slots.length + kBlock - 1) / kBlock;
  slots.begin = blocks * work.part / work.parts;
  slots.blocks = blocks * (work.part + 1) / work.parts - slots.begin;
  return slots;
}

// ---- producer --------------------------------------------------------------------------------------------------
//
// Warp w gathers rows 16 w .. 16 w + 15 of each block. Eight lanes copy 128 contiguous bytes, a warp four rows. Rows of 576
// bytes start at a 128-byte line or in the middle of one; copies keep to the lines, so an odd row is read as 64 + 4 x 128
// bytes and an even one as 4 x 128 + 64. That is half again as fast as copies that straddle lines.
//
// The blocks of a round go into the ring in turn: block 0 of each warpgroup's slots, block 1 of each, ..., a warpgroup with
// fewer being left out from then on.

struct Producer {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp;
  Ring<kStages> stage;

  DEVICE int load_index(const Slots& slots, int block) const {
    const int slot = block * kBlock + warp * 16 + (lane & 15);
    return slot < slots.length ? __ldg(params.indices + slots.token * params.indices_stride + slot) : -1;
  }

  // Q of an item, zeros for heads past h_q
  DEVICE void load_q(u32 warpgroup, u32 parity, const Slots& slots) const {
    mbarrier_wait(memory.q_empty(warpgroup), parity ^ 1);
    const u8* source = params.q + slots.token * params.q_stride_token;
#pragma unroll 1
    for (u32 c = warp * 32 + lane; c < kHeads * (D_QK / 16); c += 128) {
      const u32 row = c / (D_QK / 16), chunk = c % (D_QK / 16), head = slots.first_head + row;
      const bool exists = head < static_cast<u32>(params.h_q);
      const u32 latent = chunk / 8 * kQTile + row * 128 + ((chunk ^ row) % 8 << 4);
      const u32 rope = kQRope + row * 64 + ((chunk ^ row >> 1) % 4 << 4);
      cp_async_16(memory.q(warpgroup) + (chunk < kDv / 16 ? latent : rope),
                  source + (exists ? head : 0) * params.q_stride_head + chunk * 16, exists ? 16 : 0);
    }
    cp_async_arrive(memory.q_full(warpgroup));
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
    // Opaque, here and below: kept from block to block, what follows from it would not fit in registers.
    const u32 row = opaque(lane) >> 3, eighth = opaque(lane) & 7;
    const u32 latent = memory.k(slot) + warp * 2048, rope = memory.k(slot) + kRope + warp * 1024;
#pragma unroll
    for (u32 pass = 0; pass < 4; pass++) {
      const u32 r = 4 * pass + row;
      const int i = __shfl_sync(~0u, index, r);
      const u8* source = row_of(i);
      const u32 bytes = i >= 0 ? 16 : 0;
      // Lane `eighth` of a line copies chunk `chunk` + 8 line of the row: in an odd row, the last ones are rope.
      const u32 odd = D_QK > kDv ? static_cast<u32>(reinterpret_cast<u64>(source)) >> 6 & 1 : 0;
      const u32 chunk = eighth + 4 * odd;
      source += chunk * 16;
      const u32 first = latent + chunk / 8 * kLatentTile + r * 128 + ((chunk ^ r) % 8 << 4);
#pragma unroll
      for (u32 line = 0; line < 3; line++) cp_async_16(first + line * kLatentTile, source + line * 128, bytes);
      const u32 last = chunk < 8 ? first + 3 * kLatentTile : rope + r * 64 + ((chunk ^ r >> 1) % 4 << 4);
      cp_async_16(last, source + 3 * 128, bytes);
    }
    if constexpr (D_QK > kDv) {
      const u32 quarter = opaque(lane) & 3;
#pragma unroll
      for (u32 pass = 0; pass < 2; pass++) {
        const u32 r = 8 * pass + (opaque(lane) >> 2);
        const int i = __shfl_sync(~0u, index, r);
        const u8* source = row_of(i);
        const bool odd = static_cast<u32>(reinterpret_cast<u64>(source)) >> 6 & 1;
        const u32 half = odd ? latent + r * 128 + ((quarter ^ r) % 8 << 4) : rope + r * 64 + ((quarter ^ r >> 1) % 4 << 4);
        cp_async_16(half, source + (odd ? 0 : kDv) + quarter * 16, i >= 0 ? 16 : 0);
      }
    }
    if constexpr (kKvScales) {
      if (lane < 16) cp_async_4(memory.kv_scale(slot, warp * 16 + lane), params.kv_scale + max(index, 0), index >= 0 ? 4 : 0);
    }
    cp_async_arrive(memory.k_full(slot));
    stage.next();
  }

  // Its slots of the next round, and the indices of their first block: on their way long before they are needed.
  struct Stream {
    Slots slots;
    int item, index;
    u32 q_parity;
  };

  DEVICE void advance(Stream& stream, const Work& work) const {
    stream.item += work.step;
    stream.slots = slots_of(params, work, stream.item);
    stream.index = load_index(stream.slots, stream.slots.begin);
  }

  template <u32 w>
  DEVICE void step(Stream& stream, int block, int blocks) {
    if (block >= blocks) return;
    // Q has one buffer for each warpgroup, and its last item's is in use to the end of that one's last S: asked for now, the
    // wait is over when the stages of the blocks that follow are free.
    if (block == min(kQAfter, blocks - 1)) {
      load_q(w, stream.q_parity, stream.slots);
      stream.q_parity ^= 1;
    }
    const int index = stream.index;
    if (block + 1 < blocks) {
      stream.index = load_index(stream.slots, stream.slots.begin + block + 1);
    } else {
      advance(stream, work_of(params, w));
    }
    gather(index);
  }

  DEVICE void run() {
    const Work first = work_of(params, 0);
    Stream streams[kWarpgroups];
#pragma unroll
    for (u32 w = 0; w < kWarpgroups; w++) {
      const Work work = work_of(params, w);
      streams[w] = {slots_of(params, work, work.item), work.item, 0, 0};
      streams[w].index = load_index(streams[w].slots, streams[w].slots.begin);
    }
    for (int offset = 0; first.item + offset < first.items; offset += first.step) {
      int blocks[kWarpgroups], most = 0;
#pragma unroll
      for (u32 w = 0; w < kWarpgroups; w++) {
        blocks[w] = streams[w].slots.blocks;
        most = max(most, blocks[w]);
      }
#pragma unroll
      for (u32 w = 0; w < kWarpgroups; w++) {
        if (blocks[w] == 0) advance(streams[w], work_of(params, w));
      }
#pragma unroll 1
      for (int block = 0; block < most; block++) {
        step<0>(streams[0], block, blocks[0]);
        step<1>(streams[1], block, blocks[1]);
        if constexpr (kWarpgroups > 2) step<kWarpgroups - 1>(streams[kWarpgroups - 1], block, blocks[kWarpgroups - 1]);
      }
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
  const u32 lane, warp, group;
  Ring<kStages> stage;
  u32 q_parity = 0;
  float o[kTiles][kHeads / 2];
  float c[kOwn], reference[kOwn], sum[kOwn], top[kOwn];  // own head e is head(e)

  DEVICE u32 head(u32 e) const { return 8 * (e / 2) + 2 * (lane & 3) + e % 2; }
  DEVICE u32 thread() const { return warp * 32 + lane; }
  DEVICE void sync() const { barrier_sync(kOwnBarrier + group, 128); }

  DEVICE void start(const Slots& slots) {
    const float kv_scale = kKvScales ? 1.f : __ldg(params.kv_scale);
    const float* q_scale = params.q_scale + static_cast<i64>(slots.token) * params.q_scale_stride_token;
#pragma unroll
    for (u32 e = 0; e < kOwn; e++) {
      const int h = min(slots.first_head + static_cast<int>(head(e)), params.h_q - 1);
      const float scale = __ldg(q_scale + h * params.q_scale_stride_head);
      c[e] = is_scale(scale) && is_scale(kv_scale) ? params.sm_scale * scale * kv_scale * kLog2e : kBad;
      reference[e] = kLowest;
      sum[e] = 0.f;
      top[e] = -kInfinity;
    }
#pragma unroll
    for (u32 m = 0; m < kTiles; m++) {
#pragma unroll
      for (u32 i = 0; i < kHeads / 2; i++) o[m][i] = 0.f;
    }
    sync();  // all four warps have used the weights of the item before
  }

  // S^T = K[stage] Q^T, in parts of 192 columns, left in flight
  DEVICE void start_scores(float (&part)[kParts][kHeads / 2]) {
    mbarrier_wait(memory.k_full(stage.slot), stage.parity);
    fence_async_shared();  // K and Q came by cp.async and are read by wgmma
    const u32 k = memory.k(stage.slot), q = memory.q(group);
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

  // S to logits in units of log2, plus log2 k where tokens have scales k: what P is a power of. `k_log2`: of the two slots.
  DEVICE void to_exponents(float (&s)[kHeads / 2], float (&k_log2)[2]) {
    const u64 valid = load_shared_u64(memory.valid(stage.slot)) >> (warp * 16 + (lane >> 2));
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const bool in = valid >> 8 * r & 1;
      float k = 1.f;
      k_log2[r] = 0.f;
      if constexpr (kKvScales) {
        k = load_shared_float(memory.kv_scale(stage.slot, warp * 16 + (lane >> 2) + 8 * r));
        k = !in ? 1.f : is_scale(k) ? k : kNan;
        k_log2[r] = log2_approx_subnormal(k);
      }
#pragma unroll
      for (u32 e = 0; e < kOwn; e++) {
        float& x = s[e / 2 * 4 + 2 * r + e % 2];
        x = in ? x * (c[e] * k) : -kInfinity;
        if constexpr (kKvScales) {
          top[e] = fmaxf(top[e], x);
          x += k_log2[r];
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
      count /= 2;
      if (count > 0) {
        e += upper ? count : 0;
#pragma unroll
        for (u32 k = 0; k < count; k++) {
          const float kept = upper ? x[k + count] : x[k], sent = upper ? x[k] : x[k + count];
          x[k] = combine(kept, __shfl_xor_sync(~0u, sent, lanes));
        }
      } else {
        first = first && !upper;
        x[0] = combine(x[0], __shfl_xor_sync(~0u, x[0], lanes));
      }
    }
    if (first) store_shared_float((memory.*where)(group, warp, head(e)), x[0]);
  }

  // Moves the references to the new maxima; `factor` is what O and the sums are multiplied by.
  DEVICE void move_references(const float (&s)[kHeads / 2], float (&factor)[kOwn]) {
    float most[kOwn];
#pragma unroll
    for (u32 e = 0; e < kOwn; e++) most[e] = fmaxf(s[e / 2 * 4 + e % 2], s[e / 2 * 4 + 2 + e % 2]);
    store_over_slots(&Memory::maximum, most, [](float a, float b) { return fmaxf(a, b); });
    sync();
#pragma unroll
    for (u32 n = 0; n < kGroups; n++) {
      float2 x = load_shared_float2(memory.maximum(group, 0, head(2 * n)));
#pragma unroll
      for (u32 w = 1; w < 4; w++) {
        const float2 y = load_shared_float2(memory.maximum(group, w, head(2 * n)));
        x.x = fmaxf(x.x, y.x);
        x.y = fmaxf(x.y, y.y);
      }
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        float& ref = reference[2 * n + e];
        const float moved = fmaxf(ref, (e ? x.y : x.x) - kHeadroom);
        factor[2 * n + e] = exp2_approx(ref - moved);
        ref = moved;
      }
    }
  }

  // P = 2^(S - ref), to e4m3 and, transposed, to shared memory. Slots g and g + 8 of a warp's 16 become neighbours: a row
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
          const float exponent = s[4 * n + 2 * r + e] - reference[2 * n + e];
          x[2 * e + r] = exp2_approx(exponent);
          added += kKvScales ? exp2_approx(exponent - k_log2[r]) : x[2 * e + r];
        }
        sum[2 * n + e] = fmaf(sum[2 * n + e], factor[2 * n + e], added);
      }
      packed[n] = pack_e4m3(x[0], x[1], x[2], x[3]);
    }
    stmatrix_trans(memory.p(group) + warp * (16 * kHeads) + (lane & (kHeads - 1)) * 16, packed);
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

  // O^T = O^T factor + V[stage]^T P^T, one tile in flight while the one before it is added
  DEVICE void multiply_values(u32 (&v)[2][2][4], const float (&factor)[kOwn]) {
    const u64 p = descriptor(descriptor_shape(16 * kHeads, 128, Swizzle::none), memory.p(group));
    float t[2][kHeads / 2];
#pragma unroll
    for (u32 m = 0; m < kTiles; m++) {
      part_columns(v[m & 1][0]);
      part_columns(v[m & 1][1]);
      wgmma_fence();
      wgmma_registers<kHeads>(t[m & 1], v[m & 1][0], p, 0);
      wgmma_registers<kHeads>(t[m & 1], v[m & 1][1], p + (32 * kHeads >> 4), 1);
      wgmma_commit();
      if (m > 0) wgmma_wait<1>();  // its V may be overwritten, its product is there
      if (m + 1 < kTiles) {
        load_v(v[m + 1 & 1][0], 0, m + 1);
        load_v(v[m + 1 & 1][1], 1, m + 1);
      }
      if (m + 2 == kTiles) mbarrier_arrive(memory.k_empty(stage.slot));
      if (m > 0) add(m - 1, t[m - 1 & 1], factor);
    }
    wgmma_wait<0>();
    add(kTiles - 1, t[kTiles - 1 & 1], factor);
  }

  DEVICE void attend(bool last) {
    float s[kHeads / 2], factor[kOwn], k_log2[2];
    u32 v[2][2][4];
    {
      float part[kParts][kHeads / 2];
      start_scores(part);
      load_v(v[0][0], 0, 0);  // V is the K tile: its first fragments are read under the product
      load_v(v[0][1], 1, 0);
      wgmma_wait<0>();
      sum_parts(s, part);
    }
    if (last) mbarrier_arrive(memory.q_empty(group));
    to_exponents(s, k_log2);
    move_references(s, factor);  // its barrier: P may be overwritten, all four warps are through with the last product
    write_p(s, k_log2, factor);
    fence_async_shared();  // P was stored by stmatrix and is read by wgmma
    sync();
    multiply_values(v, factor);
  }

  // What is known of a head over some slots: log2 of the scale of its P, the sum of P, the largest logit.
  struct Statistics {
    float reference, total, top;
  };

  // Of head `thread()`, from what its warps know
  DEVICE Statistics gather_statistics() {
    store_over_slots(&Memory::maximum, sum, [](float a, float b) { return a + b; });
    if (kKvScales) store_over_slots(&Memory::top, top, [](float a, float b) { return fmaxf(a, b); });
    if (warp == 0 && lane < 4) {
#pragma unroll
      for (u32 e = 0; e < kOwn; e++) store_shared_float(memory.weight(group, head(e)), reference[e]);
    }
    sync();
    const u32 h = min(thread(), kHeads - 1);
    Statistics x{load_shared_float(memory.weight(group, h)), 0.f, -kInfinity};
#pragma unroll
    for (u32 w = 0; w < 4; w++) {
      x.total += load_shared_float(memory.maximum(group, w, h));
      if (kKvScales) x.top = fmaxf(x.top, load_shared_float(memory.top(group, w, h)));
    }
    if (!kKvScales) x.top = x.reference + kHeadroom;
    return x;
  }

  // The scale of V; NaN where a scale of head h is bad.
  DEVICE float value_scale(int token, int h) const {
    const float q_scale = __ldg(params.q_scale + static_cast<i64>(token) * params.q_scale_stride_token +
                                min(h, params.h_q - 1) * params.q_scale_stride_head);
    const float v_scale = kKvScales ? 1.f : __ldg(params.kv_scale);
    return is_scale(q_scale) && is_scale(v_scale) ? v_scale : kNan;
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

  // The end of an item that this warpgroup has had to itself
  DEVICE void finish(const Slots& slots) {
    const Statistics x = gather_statistics();
    if (thread() < kHeads) {
      const int h = slots.first_head + thread();
      const float v_scale = value_scale(slots.token, h);
      store_statistics(slots.token, h, x, v_scale);
      store_shared_float(memory.weight(group, thread()), x.total == 0.f ? 0.f : v_scale / denominator(x, h));
    }
    sync();
#pragma unroll
    for (u32 n = 0; n < kGroups; n++) {
      const float2 w = load_shared_float2(memory.weight(group, head(2 * n)));
#pragma unroll
      for (u32 m = 0; m < kTiles; m++) {
        const float* x = o[m] + 4 * n;
        store_out(slots.token, slots.first_head + head(2 * n), m, warp, lane >> 2,
                  make_float4(x[0] * w.x, x[1] * w.y, x[2] * w.x, x[3] * w.y));
      }
    }
  }

  // The end of an item in parts: each is left in shared memory, and all warpgroups of the cluster add up some of the
  // columns of all parts, in the order of the slots.
  DEVICE void finish_part(const Slots& slots, const Work& work) {
    const Statistics x = gather_statistics();
    barrier_sync(kAll, 128 * kWarpgroups);  // nobody needs the stages any more
    if (thread() < kHeads) {
      store_shared_float(memory.statistic(group, 0, thread()), x.reference);
      store_shared_float(memory.statistic(group, 1, thread()), x.total);
      store_shared_float(memory.statistic(group, 2, thread()), x.top);
    }
#pragma unroll
    for (u32 m = 0; m < kTiles; m++) {
#pragma unroll
      for (u32 n = 0; n < kGroups; n++) {
        const float* x = o[m] + 4 * n;
        store_shared_float4(memory.part(group, (m * kGroups + n) * 128 + thread()), x[0], x[1], x[2], x[3]);
      }
    }
    cluster_sync();
    const u32 cta = work.part / kWarpgroups, ctas = work.parts / kWarpgroups;
    const u32 first = group * 128 + thread();
    for (u32 at = first; at < work.parts * kHeads; at += 128 * kWarpgroups) {
      weigh_part(slots, work.parts, at / kHeads, at % kHeads, cta == 0);
    }
    barrier_sync(kAll, 128 * kWarpgroups);
    for (u32 at = cta * (128 * kWarpgroups) + first; at < kTiles * kGroups * 128; at += ctas * (128 * kWarpgroups)) {
      add_parts(slots, work.parts, at);
    }
    cluster_sync();  // a CTA must not exit while its parts are read
  }

  DEVICE u32 statistic_of_part(u32 part, u32 which, u32 head) const {
    return cluster_address(memory.statistic(part % kWarpgroups, which, head), part / kWarpgroups);
  }

  // What the O^T of one part is multiplied by, for one head; `store`: part 0 says what max_logits and lse are.
  DEVICE void weigh_part(const Slots& slots, u32 parts, u32 own, u32 head, bool store) const {
    Statistics all{kLowest, 0.f, -kInfinity};
    for (u32 part = 0; part < parts; part++) {
      all.reference = fmaxf(all.reference, load_cluster_float(statistic_of_part(part, 0, head)));
    }
    float to_all = 0.f;
    for (u32 part = 0; part < parts; part++) {
      const float factor = exp2_approx(load_cluster_float(statistic_of_part(part, 0, head)) - all.reference);
      all.total = fmaf(load_cluster_float(statistic_of_part(part, 1, head)), factor, all.total);
      all.top = fmaxf(all.top, load_cluster_float(statistic_of_part(part, 2, head)));
      if (part == own) to_all = factor;
    }
    const int h = slots.first_head + head;
    const float v_scale = value_scale(slots.token, h);
    store_shared_float(memory.weight_of_part(own, head), all.total == 0.f ? 0.f : to_all * v_scale / denominator(all, h));
    if (store && own == 0) store_statistics(slots.token, h, all, v_scale);
  }

  // The float4 at place `at` of each part, weighted and summed: two columns of two heads of out
  DEVICE void add_parts(const Slots& slots, u32 parts, u32 at) const {
    const u32 m = at / (kGroups * 128), n = at / 128 % kGroups, owner = at % 128;
    const u32 head = 8 * n + 2 * (owner & 3);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    for (u32 part = 0; part < parts; part++) {
      const float4 y = load_cluster_float4(cluster_address(memory.part(part % kWarpgroups, at), part / kWarpgroups));
      const float2 w = load_shared_float2(memory.weight_of_part(part, head));
      x = make_float4(fmaf(y.x, w.x, x.x), fmaf(y.y, w.y, x.y), fmaf(y.z, w.x, x.z), fmaf(y.w, w.y, x.w));
    }
    store_out(slots.token, slots.first_head + head, m, owner >> 5, owner >> 2 & 7, x);
  }

  DEVICE void run() {
    const Work work = work_of(params, group), first = work_of(params, 0);
    for (int offset = 0; first.item + offset < work.items; offset += work.step) {
      const Slots slots = slots_of(params, work, work.item + offset);
      int blocks[kWarpgroups];  // of all, to know where in the ring this one's blocks are
      u32 before = 0, sum_of_all = 0;
#pragma unroll
      for (u32 w = 0; w < kWarpgroups; w++) {
        const Work other = work_of(params, w);
        blocks[w] = slots_of(params, other, other.item + offset).blocks;
        sum_of_all += blocks[w];
        if (w < group && blocks[w] > 0) before++;
      }
      const Ring<kStages> round = stage;
      if (work.item + offset < work.items) {
        start(slots);
        stage.advance(before);
        if (slots.blocks > 0) {
          mbarrier_wait(memory.q_full(group), q_parity);
          q_parity ^= 1;
        }
        for (int block = 0; block < slots.blocks; block++) {
          attend(block + 1 == slots.blocks);
          u32 to_next = 1;
#pragma unroll
          for (u32 w = 0; w < kWarpgroups; w++) {
            if (w != group && blocks[w] > block + (w < group)) to_next++;
          }
          stage.advance(to_next);
        }
        if (params.ctas_per_item > 0) {
          finish_part(slots, work);
        } else {
          finish(slots);
        }
      }
      stage = round;
      stage.advance(sum_of_all);
    }
  }
};

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(kThreads, 1) void sparse_mla_prefill_few_heads(
    const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(1024) u8 shared[];
  const Memory memory{opaque(shared_address(shared))};
  const u32 lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const u32 role = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(memory.k_full(i), 128 + 4);  // producer: copies of all threads, and what its four warps store
      mbarrier_init(memory.k_empty(i), 128);     // the warpgroup that used it
    }
    for (u32 i = 0; i < kWarpgroups; i++) {
      mbarrier_init(memory.q_full(i), 128);   // producer
      mbarrier_init(memory.q_empty(i), 128);  // the warpgroup
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (role == kWarpgroups) {
    set_max_registers_down<kProducerRegisters>();
    Producer{params, memory, lane, warp, {}}.run();
  } else {
    set_max_registers_up<kAttendRegisters>();
    Attend{params, memory, lane, warp, role, {}}.run();
  }
}
