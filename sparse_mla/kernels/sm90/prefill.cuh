// FP8 sparse MLA prefill on Hopper, 64 heads a CTA. Compile with -D D_QK=512 or 576, -D ROW_SCALES=0 or 1
// and -D KV_SCALES=0 or 1; `backends/sm90.py` launches it.
//
//   for a query token t and 64 of its heads:
//     S[h, j]  = sum_d Q[h, d] K[j, d]                 K[j] = kv[indices[t, j]], zeros where the slot is invalid
//     P[h, j]  = 2^(c S[h, j] - ref[h])                c = sm_scale q_scale kv_scale log2(e)
//     O[h, d]  = sum_j P[h, j] V[j, d] / sum_j P[h, j] V = the first 512 columns of K
//
// With a scale for each KV token (KV_SCALES), k[j] below: c is without it, P[h, j] = k[j] 2^(c k[j] S[h, j] - ref[h]), and
// the denominator sums P[h, j] / k[j].
//
// Why this shape of kernel. FP8 wgmma wants both operands K-major, and V is not: its transposed copy would have to be
// written to shared memory, whose bandwidth is what such a kernel runs out of first. Here V^T is the A operand of
// O^T = V^T P^T and comes from registers: ldmatrix.trans reads it transposed in 16-bit units and two byte permutations a
// register finish the job. Most of Q is an A operand in registers too, loaded once a query token. So the tensor cores
// read from shared memory only K and a part of Q (in S = Q K^T) and P (in O^T = V^T P^T).
//
// Four warpgroups, one job each; a block is 64 slots of K in one stage, a pair is two blocks, b counts pairs:
//
//   producer    gathers K[b+1], K[b+2], ...  by 16-byte cp.async into a ring of stages, and says which slots are valid
//   scores      S[b+1] = Q K[b+1]^T    |  softmax of S[b+1]: P[b+1], and factors for O, whose reference may have moved
//   values 0,1  O^T = O^T factor + V[b]^T P[b]^T, columns 0-255 and 256-511
//
// The three work on different pairs at a time, and nothing goes back from the values to the scores but free buffers: so
// the scores are in the next query token while the values still write the last one out. Why pairs: the maxima are
// exchanged between lanes, O is multiplied and added to, and products are waited for half as often.
#pragma once

#include "common/problem.cuh"
#include "common/wgmma.cuh"

constexpr bool kRowScales = ROW_SCALES;  // q_scale a token, or a token and head; else one for all
constexpr bool kKvScales = KV_SCALES;    // kv_scale a KV token; else one for all
constexpr int kHeads = HEADS;     // heads a CTA: M of S = Q K^T, N of O^T = V^T P^T
constexpr int kPair = 2 * kBlock;  // slots of a pair: they share a reference of the exponent and one addition to O
constexpr int kStages = 5;        // blocks of K in shared memory
constexpr int kLag = 1;           // blocks of copies in flight before the oldest must have landed
constexpr int kPBytes = kHeads * kPair;
constexpr int kQSteps = D_QK / 32;  // k-steps of S = Q K^T
constexpr int kQInRegisters = 11;  // the last of them, whose Q is in registers: what two blocks of S leave room for
constexpr int kQShared = kQSteps - kQInRegisters;  // the first of them, whose Q wgmma reads from shared memory
constexpr int kQBytes = kHeads * kQShared * 32;

constexpr int kThreads = 512;
constexpr u32 kProducerRegisters = 24, kScoreRegisters = 136, kValueRegisters = 176;  // 128 x sum = 65,536

// Shared memory, by byte offset. Tiles want 1024-byte alignment (the swizzles repeat within it).
constexpr u32 kAtK = 0;                                   // [kStages][kStageBytes]
constexpr u32 kAtQ = kAtK + kStages * kStageBytes;        // [2][kQBytes]: 8 heads x 16 columns core matrices
constexpr u32 kAtP = kAtQ + 2 * kQBytes;                  // [2][kPBytes]: 8 heads x 16 slots core matrices
constexpr u32 kAtFactor = kAtP + 2 * kPBytes;             // float [2][kHeads]: O is multiplied by it before P[b] is added
constexpr u32 kAtWeight = kAtFactor + 2 * kHeads * 4;     // float [4][kHeads]: kv_scale / sum of an item. 4: it may be
                                                          // read while the scores are two items further
constexpr u32 kAtLast = kAtWeight + 4 * kHeads * 4;       // u32 [2]: whether the pair is its item's last
constexpr u32 kAtValid = kAtLast + 2 * 4;                 // u64 [kStages], bit r: slot r of the block is valid
constexpr u32 kAtKvScale = kAtValid + kStages * 8;        // float [kStages][kBlock]
constexpr u32 kAtKFull = kAtKvScale + (KV_SCALES ? kStages * kBlock * 4 : 0);  // mbarriers from here
constexpr u32 kAtKEmpty = kAtKFull + kStages * 8;
constexpr u32 kAtPFull = kAtKEmpty + kStages * 8;
constexpr u32 kAtPEmpty = kAtPFull + 2 * 8;
constexpr u32 kAtQEmpty = kAtPEmpty + 2 * 8;
constexpr u32 kSharedBytes = kAtQEmpty + 2 * 8;
static_assert(kSharedBytes <= 232448, "more than a CTA of compute capability 9.0 can have");

extern __shared__ __align__(1024) u8 shared[];

// Shared memory by address. The base stays in a register; a generic pointer would be converted at each use.
struct Memory {
  u32 base;
  DEVICE u32 k(u32 slot) const { return base + kAtK + slot * kStageBytes; }
  DEVICE u32 q(u32 buffer) const { return base + kAtQ + buffer * kQBytes; }
  DEVICE u32 p(u32 slot) const { return base + kAtP + slot * kPBytes; }
  // The factors of heads 16 j + 2 i + 0, 1, 8, 9 lie together, where lane i of a quad reads them at once.
  DEVICE u32 factor(u32 slot) const { return base + kAtFactor + slot * (kHeads * 4); }
  DEVICE u32 weight(u32 item, u32 head) const { return base + kAtWeight + item * (kHeads * 4) + head * 4; }
  DEVICE u32 last(u32 slot) const { return base + kAtLast + slot * 4; }
  DEVICE u32 valid(u32 slot) const { return base + kAtValid + slot * 8; }
  DEVICE u32 kv_scale(u32 slot, u32 row) const { return base + kAtKvScale + (slot * kBlock + row) * 4; }
  DEVICE u32 k_full(u32 slot) const { return base + kAtKFull + slot * 8; }
  DEVICE u32 k_empty(u32 slot) const { return base + kAtKEmpty + slot * 8; }
  DEVICE u32 p_full(u32 slot) const { return base + kAtPFull + slot * 8; }
  DEVICE u32 p_empty(u32 slot) const { return base + kAtPEmpty + slot * 8; }
  DEVICE u32 q_empty(u32 buffer) const { return base + kAtQEmpty + buffer * 8; }
};

// An item is 64 heads of a token. Computed where they are used: registers are dearer than a few instructions an item.
DEVICE int groups_of(const PrefillParams& params) { return (params.h_q + kHeads - 1) / kHeads; }
DEVICE int items_of(const PrefillParams& params) { return params.s_q * groups_of(params); }

// An empty row still takes one (fully masked) pair, so that every role sees every item.
DEVICE int pairs_of(int length) { return max(1, (length + kPair - 1) / kPair); }
DEVICE int blocks_of(int length) { return 2 * pairs_of(length); }

// Q of one head of an item, the last head's for heads past h_q: what becomes of those is not stored.
DEVICE const u8* head_of(const PrefillParams& params, int token, int group, u32 row) {
  const u32 head = min(group * kHeads + static_cast<int>(row), params.h_q - 1);
  return params.q + token * params.q_stride_token + head * params.q_stride_head;
}

// ---- producer --------------------------------------------------------------------------------------------------
//
// Warp w gathers rows 16 w .. 16 w + 15 of each block. Eight lanes copy 128 contiguous bytes, a warp four rows; the rope
// part is 64 bytes of eight rows an instruction. Every second row of 576 bytes starts in the middle of a 128-byte line,
// and its pieces touch two lines each: reading such rows as 64 + 4 x 128 bytes makes the gather alone 1.5 times
// faster, but its instructions cost the other warps more than it gives.

struct Producer {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp;
  Ring<kStages> stage, announced;

  DEVICE int load_index(const int* row, int length, int block) const {
    const int slot = block * kBlock + warp * 16 + (lane & 15);
    return slot < length ? __ldg(row + slot) : -1;
  }

  // The part of an item's Q that is read from shared memory, the last head in the place of those past h_q; the other
  // part is called to L2. The copies belong to the next block's group: where that block is full, Q is there.
  DEVICE void load_q(int token, int group, u32 turn) const {
    const u32 buffer = turn & 1;
    mbarrier_wait(memory.q_empty(buffer), turn >> 1 & 1 ^ 1);
    const u32 row = opaque(warp * 32 + lane) >> 1, half = opaque(lane) & 1;
    const u8* source = head_of(params, token, group, row);
    const u32 target = memory.q(buffer) + half * 1024 + row * 16;
#pragma unroll
    for (u32 step = 0; step < kQShared; step++) cp_async_16(target + step * 2048, source + half * 16 + step * 32, 16);
    // Each 128-byte line of the rest once: a row starts anywhere in one.
    prefetch_l2(source + kQShared * 32 + half * 128);
    prefetch_l2(source + (half ? D_QK - 1 : kQShared * 32 + 256));
  }

  // Issues the copies of one block; `announce` tells the scores when they have landed.
  DEVICE void gather(int index, int& issued) {
    const u32 slot = stage.slot;
    // Two stages become free at a time. Before a wait for the next two, the block in flight must become full: its pair
    // is what they wait for.
    if (!__all_sync(~0u, mbarrier_test(memory.k_empty(slot), stage.parity ^ 1))) flush(issued);
    mbarrier_wait(memory.k_empty(slot), stage.parity ^ 1);
    const bool index_valid = static_cast<u32>(index) < static_cast<u32>(params.s_kv);
    const u32 valid = __ballot_sync(~0u, index_valid);
    if (lane == 0) store_shared_u16(memory.valid(slot) + warp * 2, valid);
    if (!index_valid) index = -1;
    const u32 kv_stride = static_cast<u32>(params.kv_stride);
    {
      // Opaque, here and below: kept from block to block, what follows from it would not fit in registers.
      const u32 row = opaque(lane) >> 3, eighth = opaque(lane) & 7;
      const u32 latent = memory.k(slot) + warp * 2048 + row * 128 + ((eighth ^ row) << 4);
#pragma unroll
      for (u32 pass = 0; pass < 4; pass++) {
        const int i = __shfl_sync(~0u, index, 4 * pass + row);
        const u8* source = params.kv + static_cast<u64>(static_cast<u32>(max(i, 0))) * kv_stride + eighth * 16;
        const u32 line = (latent ^ (pass & 1) << 6) + pass * 512;  // the swizzle of row + 4 pass
#pragma unroll
        for (u32 tile = 0; tile < kLatentTiles; tile++) {
          cp_async_16(line + tile * kLatentTile, source + tile * 128, i >= 0 ? 16 : 0);
        }
      }
    }
    if constexpr (D_QK > kDv) {
      const u32 row = opaque(lane) >> 2, quarter = opaque(lane) & 3;
      const u32 rope = memory.k(slot) + kRope + warp * 1024 + row * 64 + ((quarter ^ row >> 1 & 3) << 4);
#pragma unroll
      for (u32 pass = 0; pass < 2; pass++) {
        const int i = __shfl_sync(~0u, index, 8 * pass + row);
        const u8* source = params.kv + static_cast<u64>(static_cast<u32>(max(i, 0))) * kv_stride + kDv + quarter * 16;
        cp_async_16(rope + pass * 512, source, i >= 0 ? 16 : 0);
      }
    }
    if constexpr (kKvScales) {
      if (lane < 16) cp_async_4(memory.kv_scale(slot, warp * 16 + lane), params.kv_scale + max(index, 0), index >= 0 ? 4 : 0);
    }
    cp_async_commit();
    stage.next();
  }

  // Blocks become full `kLag` blocks after their copies were issued: the wait, and the fence that wgmma needs after
  // copies of the generic proxy, are here and not in the scores.
  template <int lag>
  DEVICE void announce() {
    cp_async_wait<lag>();
    fence_async_shared();
    mbarrier_arrive(memory.k_full(announced.slot));
    announced.next();
  }

  DEVICE void flush(int& issued) {
    for (; issued > 0; issued--) announce<0>();
  }

  DEVICE void run() {
    const int groups = groups_of(params), items = items_of(params);
    int item = blockIdx.x;
    if (item >= items) return;
    int length = length_of(params, item / groups);
    const int* row = params.indices + item / groups * params.indices_stride;
    int index = load_index(row, length, 0);
    load_q(item / groups, item % groups, 0);
    u32 turn = 1;
    int issued = 0;
    while (true) {
      const bool more = item + static_cast<int>(gridDim.x) < items;
      const int next_length = more ? length_of(params, (item + gridDim.x) / groups) : 0;
      for (int block = 0; block < blocks_of(length); block++) {
        const bool last = block + 1 == blocks_of(length);
        int ahead = -1;  // the index of the next block is on its way while this one's rows are asked for
        if (!last) {
          ahead = load_index(row, length, block + 1);
        } else if (more) {
          row = params.indices + (item + gridDim.x) / groups * params.indices_stride;
          ahead = load_index(row, next_length, 0);
        }
        gather(index, issued);
        if (issued < kLag) issued++; else announce<kLag>();
        index = ahead;
        // The next item's Q goes into the buffer of the last item's. That is certainly free when the values have given
        // back this item's first stage; in a shorter item the scores may still need the blocks not yet announced.
        if (more && (last ? block <= kStages : block == kStages)) {
          if (block < kStages) flush(issued);
          load_q((item + gridDim.x) / groups, (item + gridDim.x) % groups, turn);
        }
      }
      if (!more) break;
      item += gridDim.x;
      length = next_length;
      turn++;
    }
    flush(issued);
  }
};

// ---- scores ----------------------------------------------------------------------------------------------------
//
// Lane 4 g + i of warp w owns rows (heads) 16 w + g and 16 w + g + 8, slots 8 j + 2 i and + 1 of each block: a row's
// maximum runs over the four lanes of a quad in every pair, its sum only at the end of an item.

struct Scores {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp;
  Ring<kStages> stage;
  Ring<2> p_slot;
  u32 q[kQInRegisters][4];
  float s[2][32];  // of the pair's two blocks
  float reference[2], sum[2];  // of this lane's two heads, as is all that follows
  float top[2];    // the largest S k, where tokens have scales
  float c_row[2];  // c of this lane's two heads, in the variant with row scales
  float c_all;     // c of all heads, in the other

  DEVICE float c(u32 r) const { return kRowScales ? c_row[r] : c_all; }

  // Into the registers of c, to become c after the first QK: by then they are there, and no register more is taken. Where
  // tokens have scales before it: S is multiplied by c as soon as it is there.
  DEVICE void load_row_scales(int token, int group) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 head = min(group * kHeads + warp * 16 + (lane >> 2) + 8 * r, params.h_q - 1);
      c_row[r] = __ldg(params.q_scale + static_cast<i64>(token) * params.q_scale_stride_token +
                       head * params.q_scale_stride_head);
    }
  }

  DEVICE void scales_to_c(float kv_scale) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) c_row[r] = to_c(params, c_row[r], kv_scale);
  }

  // The part of Q that stays in registers, as wgmma wants it, straight from global memory.
  DEVICE void load_q(int token, int group) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      // Opaque: an address kept from item to item would not fit in registers.
      const u32 head = warp * 16 + (lane >> 2) + 8 * r;
      const u8* row = head_of(params, token, group, head) + kQShared * 32 + 4 * (opaque(lane) & 3);
#pragma unroll
      for (u32 step = 0; step < kQInRegisters; step++) {
        q[step][r] = load_global_u32(row + step * 32);
        q[step][2 + r] = load_global_u32(row + step * 32 + 16);
      }
    }
  }

  // S[half] = Q K[stage]^T, left in flight. In the order of d: the 14 bits of the sums make the order show in the logits.
  template <u32 half>
  DEVICE void start_multiply(u32 q_buffer) {
    mbarrier_wait(memory.k_full(stage.slot), stage.parity);
    const u32 tile = memory.k(stage.slot);
    const u64 latent = descriptor(descriptor_shape(16, 1024, Swizzle::bytes_128), tile);
    const u64 rope = descriptor(descriptor_shape(16, 512, Swizzle::bytes_64), tile + kRope);
    const u64 q_shared = descriptor(descriptor_shape(1024, 128, Swizzle::none), memory.q(q_buffer));
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < kQSteps; i++) {
      const u64 k = i < 16 ? latent + (i / 4 * kLatentTile + i % 4 * 32 >> 4) : rope + (i - 16) * 2;
      if (i < kQShared) {
        wgmma_m64n64k32(s[half], q_shared + i * (2048 >> 4), k, i > 0);
      } else {
        wgmma_m64n64k32(s[half], q[i - kQShared], k, i > 0);
      }
    }
    wgmma_commit();
    stage.next();
  }

  DEVICE void mask(float (&x)[32], u64 valid) const {
    if (__builtin_expect(valid == ~0ull, 1)) return;
    valid >>= 2 * (lane & 3);
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      const u32 bits = static_cast<u32>(valid >> 8 * j);
      if (!(bits & 1)) x[4 * j] = x[4 * j + 2] = -kInfinity;
      if (!(bits & 2)) x[4 * j + 1] = x[4 * j + 3] = -kInfinity;
    }
  }

  // The same where tokens have scales k; and S to logits in units of log2, and log2 k added: what P is a power of. The
  // largest of those, by row.
  DEVICE void mask_and_scale(float (&x)[32], u32 slot, float (&row_top)[2]) {
    row_top[0] = row_top[1] = -kInfinity;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
      const u32 column = 8 * j + 2 * (lane & 3);
      const u32 valid = load_shared_u8(memory.valid(slot) + j) >> 2 * (lane & 3);
      const float2 stored = load_shared_float2(memory.kv_scale(slot, column));
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        const bool in = valid >> e & 1;
        const float scale = e ? stored.y : stored.x, k = is_scale(scale) ? scale : kNan;
        const float k_log2 = log2_approx(fmaxf(k, kLeastPower));
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
          float& s = x[4 * j + 2 * r + e];
          const float sk = in ? s * k : -kInfinity;
          top[r] = fmaxf(top[r], sk);
          s = in ? fmaf(sk, c(r), k_log2) : -kInfinity;
          row_top[r] = fmaxf(row_top[r], s);
        }
      }
    }
  }

  DEVICE static float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  DEVICE static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  // The largest of this lane's elements of a block, by row.
  DEVICE static void row_maxima(const float (&block)[32], float (&row_top)[2]) {
    float top[2][4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        const float* x = block + 4 * j + 2 * r;
        top[r][j] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[16], x[17]));
      }
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) row_top[r] = fmaxf(fmaxf(top[r][0], top[r][1]), fmaxf(top[r][2], top[r][3]));
  }

  DEVICE void masked_maxima(float (&block)[32], u64 valid, u32 slot, float (&row_top)[2]) {
    if constexpr (kKvScales) {
      mask_and_scale(block, slot, row_top);
    } else {
      mask(block, valid);
      row_maxima(block, row_top);
    }
  }

  // Moves the references to the new maxima; `factor` is what O and the sums are multiplied by.
  DEVICE void move_references(float (&row_top)[2], float (&factor)[2]) {
#pragma unroll
    for (u32 lanes = 1; lanes <= 2; lanes *= 2) {
      const float other[2] = {__shfl_xor_sync(~0u, row_top[0], lanes), __shfl_xor_sync(~0u, row_top[1], lanes)};
#pragma unroll
      for (u32 r = 0; r < 2; r++) row_top[r] = fmaxf(row_top[r], other[r]);
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const float moved = fmaxf(reference[r], kKvScales ? row_top[r] - kHeadroom : fmaf(row_top[r], c(r), -kHeadroom));
      factor[r] = exp2_approx(reference[r] - moved);
      reference[r] = moved;
      sum[r] *= factor[r];
    }
  }

  // P = 2^(c S - ref) of a block, to e4m3 and to shared memory: two 8-column groups of S make one 16-slot row of P.
  DEVICE void write_p(float (&block)[32], u32 slot, u32 target) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 packed[4];
#pragma unroll
      for (u32 pair = 0; pair < 2; pair++) {
        float* x = block + 16 * half + 8 * pair;
        if constexpr (kKvScales) {
#pragma unroll
          for (u32 j = 0; j < 2; j++) {
            const float2 k = load_shared_float2(memory.kv_scale(slot, 8 * (4 * half + 2 * pair + j) + 2 * (lane & 3)));
            // Of a quarter: those of the largest scales would be flushed to zero.
            const float inverse[2] = {reciprocal_approx(0.25f * fmaxf(k.x, kLeastPower)),
                                      reciprocal_approx(0.25f * fmaxf(k.y, kLeastPower))};
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
              float& p = x[4 * j + e];
              p = exp2_approx(p - reference[e / 2]);
              sum[e / 2] = fmaf(p, inverse[e % 2], sum[e / 2]);
            }
          }
        } else {
#pragma unroll
          for (u32 e = 0; e < 8; e++) x[e] = exp2_approx(fmaf(x[e], c(e / 2 & 1), -reference[e / 2 & 1]));
          sum[0] += (x[0] + x[1]) + (x[4] + x[5]);
          sum[1] += (x[2] + x[3]) + (x[6] + x[7]);
        }
        packed[2 * pair] = pack_e4m3(x[0], x[1], x[4], x[5]);
        packed[2 * pair + 1] = pack_e4m3(x[2], x[3], x[6], x[7]);
      }
      stmatrix_x4(target + half * 2048, packed);
    }
  }

  // Row sums to 1 / sum for the values, and this item's max_logits and lse. The sum is 0 only where no slot is valid: the
  // largest logit alone has given it 256.
  DEVICE void finish(int token, int group, float kv_scale, u32 ring) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const float total = quad_sum(sum[r]) * (kKvScales ? 0.25f : 1.f), largest_of_quad = kKvScales ? quad_max(top[r]) : 0.f;
      const bool empty = total == 0.f;
      // A scale that is not finite and positive shows here, not in the exponents.
      const float v_scale = c(r) == kBad ? kNan : kv_scale;
      const u32 row = warp * 16 + (lane >> 2) + 8 * r, head = group * kHeads + row;
      if ((lane & 3) == 0 && head < static_cast<u32>(params.h_q)) {
        float denominator = total;
        if (params.attn_sink != nullptr) {
          denominator += exp2_approx(__ldg(params.attn_sink + head) * kLog2e - reference[r]);
        }
        store_shared_float(memory.weight(ring, row), empty ? 0.f : v_scale / denominator);
        // A NaN logit is lost in fmaxf but not in the sum; v_scale carries a bad scale.
        const float poison = (total + v_scale) * 0.f;
        const i64 at = static_cast<i64>(token) * params.out_heads + head;
        const float largest = kKvScales ? largest_of_quad * c(r) : reference[r] + kHeadroom;
        params.max_logits[at] = empty ? -kInfinity : largest * kLn2 + poison;
        params.lse[at] = empty ? kInfinity : (reference[r] + log2_approx(total)) * kLn2 + poison;
      }
    }
  }

  // S of the pair and its maxima, masked. Returns with this item's Q used up where the pair is its last.
  DEVICE void multiply(u32 q_buffer, float (&row_top)[2]) {
    const u32 slot0 = stage.slot;
    start_multiply<0>(q_buffer);
    const u32 slot1 = stage.slot;
    start_multiply<1>(q_buffer);
    // Under QK: P's buffer may be overwritten only after both value warpgroups have added the product of it.
    mbarrier_wait(memory.p_empty(p_slot.slot), p_slot.parity ^ 1);
    u64 valid[2];
    // Asked for before the waits; with scales of tokens behind them, because no registers are left.
    if constexpr (!kKvScales) {
      valid[0] = load_shared_u64(memory.valid(slot0));
      valid[1] = load_shared_u64(memory.valid(slot1));
    }
    wgmma_wait<1>();
    masked_maxima(s[0], valid[0], slot0, row_top);
    wgmma_wait<0>();
    float other[2];
    masked_maxima(s[1], valid[1], slot1, other);
#pragma unroll
    for (u32 r = 0; r < 2; r++) row_top[r] = fmaxf(row_top[r], other[r]);
  }

  // What the values read of a pair, but for its announcement.
  DEVICE void write_pair(const float (&factor)[2], u32 slot0, bool last) {
    if ((lane & 3) == 0) {
      const u32 place = memory.factor(p_slot.slot) + warp * 64 + (lane >> 3) * 16 + (lane >> 2 & 1) * 4;
      store_shared_float(place, factor[0]);
      store_shared_float(place + 8, factor[1]);
    }
    if (warp == 0 && lane == 0) store_shared_u32(memory.last(p_slot.slot), last);
    const u32 row = 2 * warp + (lane >> 3 & 1);
    const u32 base = memory.p(p_slot.slot) + (lane >> 4) * 1024 + row * 128 + (lane & 7) * 16;
    write_p(s[0], slot0, base);
    write_p(s[1], slot0 + 1 == kStages ? 0 : slot0 + 1, base + kPBytes / 2);
  }

  DEVICE void run() {
    const float kv_scale = kKvScales ? 1.f : __ldg(params.kv_scale);
    if constexpr (!kRowScales) c_all = to_c(params, __ldg(params.q_scale), kv_scale);
    u32 turn = 0;  // items done
    load_q(blockIdx.x / groups_of(params), blockIdx.x % groups_of(params));
    for (int item = blockIdx.x; item < items_of(params); item += gridDim.x) {
      const int pairs = pairs_of(length_of(params, item / groups_of(params)));
      if constexpr (kRowScales) load_row_scales(item / groups_of(params), item % groups_of(params));
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        reference[r] = kLowest;
        sum[r] = 0.f;
        top[r] = -kInfinity;
      }
      for (int pair = 0; pair < pairs; pair++) {
        const bool last = pair + 1 == pairs;
        float row_top[2], factor[2];
        const u32 slot0 = stage.slot;
        if (kKvScales && pair == 0) scales_to_c(kv_scale);
        multiply(turn & 1, row_top);
        if (last) {
          // The next item's Q is on its way under this pair's exponentials.
          mbarrier_arrive(memory.q_empty(turn & 1));
          const int next = item + gridDim.x;
          if (next < items_of(params)) load_q(next / groups_of(params), next % groups_of(params));
        }
        if (kRowScales && !kKvScales && pair == 0) scales_to_c(kv_scale);
        move_references(row_top, factor);
        write_pair(factor, slot0, last);
        if (last) finish(item / groups_of(params), item % groups_of(params), kv_scale, turn & 3);
        fence_async_shared();  // P was stored by stmatrix and is read by wgmma
        mbarrier_arrive(memory.p_full(p_slot.slot));
        p_slot.next();
      }
      turn++;
    }
  }
};

// ---- values ----------------------------------------------------------------------------------------------------
//
// Value warpgroup v owns columns 256 v .. 256 v + 255 of O as O^T: four m64 tiles of 64 columns. Warp w's 16 rows of
// tile m are columns 64 w + 16 m .. + 15 of those, one 16-byte chunk of a V row: rows may stand for any columns, and so
// a warp has 128 contiguous bytes of a head's output. ldmatrix.trans gives lane 4 g + i the byte pairs (columns 2 g and
// 2 g + 1) of four slots; two byte permutations part the columns. So row g of the A operand is column 2 g, row g + 8
// is column 2 g + 1, and in the end a lane holds column pairs, ready to be stored as bfloat16x2.

struct Values {
  const PrefillParams& params;
  const Memory memory;
  const u32 lane, warp, half;
  Ring<kStages> stage;
  Ring<2> p_slot;
  // Where this lane reads V in a stage, now for one tile m, now for the next: one register instead of four.
  u32 at;
  float o[4][32];

  // V^T of 32 slots of the tile that `at` stands at, columns still in pairs
  DEVICE void load_v(u32 (&v)[4], u32 stage_base, u32 step) const {
    ldmatrix_x4_trans(v, at + (stage_base + step * 4096));
  }

  // Parts the columns: the A operand of wgmma
  DEVICE static void part_columns(u32 (&v)[4]) {
    const u32 r[4] = {v[0], v[1], v[2], v[3]};
    v[0] = select_bytes(r[0], r[1], 0x6420);
    v[1] = select_bytes(r[0], r[1], 0x7531);
    v[2] = select_bytes(r[2], r[3], 0x6420);
    v[3] = select_bytes(r[2], r[3], 0x7531);
  }

  // O^T = O^T factor + T of one tile, for eight heads.
  DEVICE static void add(float* o, const float* t, float even_head, float odd_head) {
    o[0] = fmaf(o[0], even_head, t[0]);
    o[1] = fmaf(o[1], odd_head, t[1]);
    o[2] = fmaf(o[2], even_head, t[2]);
    o[3] = fmaf(o[3], odd_head, t[3]);
  }

  // O^T = O^T factor + V^T P^T of a pair, 64 columns and 32 heads at a time.
  //
  // The product of a pair is accumulated by itself and added to O in float32. FP8 wgmma keeps some 14 bits of whatever
  // it sums, the accumulator included: beside an O of 256 a product of 0.23 would lose a tenth, and a long flat tail of
  // such products its mass. The addition multiplies O by its factor at no further cost.
  DEVICE void multiply() {
    const u32 slot0 = stage.slot, base0 = memory.k(slot0);
    mbarrier_wait(memory.k_full(slot0), stage.parity);  // V is the K tile: its fragments are read before P is there
    stage.next();
    const u32 slot1 = stage.slot, base1 = memory.k(slot1);
    mbarrier_wait(memory.k_full(slot1), stage.parity);
    stage.next();
    u32 v[4][4];
#pragma unroll
    for (u32 step = 0; step < 4; step++) load_v(v[step], step < 2 ? base0 : base1, step & 1);
    mbarrier_wait(memory.p_full(p_slot.slot), p_slot.parity);
    const u64 p = descriptor(descriptor_shape(1024, 128, Swizzle::none), memory.p(p_slot.slot));
    const u32 factors = memory.factor(p_slot.slot);
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
#pragma unroll
      for (u32 step = 0; step < 4; step++) part_columns(v[step]);
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float t[16];  // rT = rV @ sP[b], one half of the heads
        wgmma_fence();
#pragma unroll
        for (u32 step = 0; step < 4; step++) wgmma_m64n32k32(t, v[step], p + (step * 2048 + h * 512 >> 4), step > 0);
        wgmma_commit();
        float4 f[2];  // bits 7 and 8 of `at` are the lane of the quad
#pragma unroll
        for (u32 j = 0; j < 2; j++) f[j] = load_shared_float4((at >> 3 & 48) + (factors + (2 * h + j) * 64));
        wgmma_wait<0>();
        if (h == 1) at = opaque(at ^ (m & 1 ? 48 : 16));
        const bool more = h == 1 && m < 3;
        if (more) {
          load_v(v[0], base0, 0);
          load_v(v[1], base0, 1);
        }
        float* x = o[m] + 16 * h;
        add(x, t, f[0].x, f[0].y);
        add(x + 4, t + 4, f[0].z, f[0].w);
        if (more) {
          load_v(v[2], base1, 0);
          load_v(v[3], base1, 1);
          if (m == 2) {
            mbarrier_arrive(memory.k_empty(slot0));
            mbarrier_arrive(memory.k_empty(slot1));
          }
        }
        add(x + 8, t + 8, f[1].x, f[1].y);
        add(x + 12, t + 12, f[1].z, f[1].w);
      }
    }
  }

  // Lines of 128 bytes, 32 bytes at a time: neighbours in time are of different lines.
  DEVICE void store(int token, int group, u32 ring) const {
    // Thread index and base address anew: they would not fit in registers beside the products.
    const u32 thread = thread_index(), pair = 2 * (thread & 3);
    const Memory memory{shared_address(shared)};
    u32* out = params.out + (static_cast<i64>(token) * params.out_heads + group * kHeads) * (kDv / 2) + (thread >> 5) * 32 +
               (thread >> 2 & 7);
    const u32 heads = params.h_q - group * kHeads;
    float2 weight[8];
#pragma unroll
    for (u32 j = 0; j < 8; j++) weight[j] = load_shared_float2(memory.weight(ring, 8 * j + pair));
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
#pragma unroll
      for (u32 j = 0; j < 8; j++) {
        const u32 head = 8 * j + pair;
        const float* x = o[m] + 4 * j;
        u32* row = out + head * (kDv / 2) + m * 8;
        if (head < heads) row[0] = pack_bf16(x[0] * weight[j].x, x[2] * weight[j].x);
        if (head + 1 < heads) row[kDv / 2] = pack_bf16(x[1] * weight[j].y, x[3] * weight[j].y);
      }
    }
  }

  DEVICE void run() {
    u32 ring = 0;
    at = opaque((half * 2 + (warp >> 1)) * kLatentTile + lane * 128 + (((warp & 1) * 4 ^ (lane & 7)) << 4));
    for (int item = blockIdx.x; item < items_of(params); item += gridDim.x) {
#pragma unroll
      for (u32 m = 0; m < 4; m++) {
#pragma unroll
        for (u32 e = 0; e < 32; e++) o[m][e] = 0.f;
      }
      bool last;
      do {
        multiply();
        last = load_shared_u32(memory.last(p_slot.slot));
        mbarrier_arrive(memory.p_empty(p_slot.slot));
        p_slot.next();
      } while (!last);
      store(item / groups_of(params), item % groups_of(params), ring);
      ring = ring + 1 & 3;
    }
  }
};

// ---- kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ __launch_bounds__(kThreads, 1) void sparse_mla_prefill(const __grid_constant__ PrefillParams params) {
  const Memory memory{opaque(shared_address(shared))};
  const u32 lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const u32 role = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    // Every thread arrives for its own loads and stores. One lane could stand in for its warp after __syncwarp; it was
    // no faster, and a race checker does not follow it.
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(memory.k_full(i), 128);   // producer
      mbarrier_init(memory.k_empty(i), 256);  // values
    }
    for (int i = 0; i < 2; i++) {
      mbarrier_init(memory.q_empty(i), 128);  // scores
      mbarrier_init(memory.p_full(i), 128);   // scores
      mbarrier_init(memory.p_empty(i), 256);  // values
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (role == 3) {
    set_max_registers_down<kProducerRegisters>();
    Producer{params, memory, lane, warp, {}, {}}.run();
  } else if (role == 2) {
    set_max_registers_up<kScoreRegisters>();
    Scores{params, memory, lane, warp, {}, {}}.run();
  } else {
    set_max_registers_up<kValueRegisters>();
    Values{params, memory, lane, warp, role, {}, {}}.run();
  }
}
